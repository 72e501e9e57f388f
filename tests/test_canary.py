"""The search of tests on the secured broker finds a planted canary."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from canary import CanaryLog, files_that_show, watching


@pytest.fixture
def log() -> logging.Logger:
    """A logger that says all to those who listen to it, or to all."""
    logger = logging.getLogger("planted")
    logger.setLevel(logging.INFO)
    return logger


def test_a_log_record_that_shows_a_canary_is_found_with_the_name_of_its_test(
    log: logging.Logger, request: pytest.FixtureRequest
) -> None:
    listening = CanaryLog("swordfish", "herring")
    request.addfinalizer(lambda: log.removeHandler(listening))
    log.addHandler(listening)

    log.info("all is well with %s", "everything")
    log.info("password is %s", "swordfish")
    try:
        raise ValueError("no herring")  # noqa: TRY301 - so that it has a stack
    except ValueError:
        log.exception("it failed")

    in_message, in_stack = listening.take()
    assert "test_a_log_record_that_shows_a_canary" in in_message
    assert "password is swordfish" in in_message
    assert "no herring" in in_stack
    assert listening.take() == []


def test_files_that_show_a_password_are_found_and_payload_only_where_spark_tells_of_its_work(tmp_path: Path) -> None:
    for name in ("a-test/report.txt", "a-test/checkpoint/offsets/0", "a-test/store.db", "a-test/client.properties"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("herring" if name.endswith(("0", "db")) else "swordfish")

    found = files_that_show(tmp_path, "swordfish", "herring")

    assert sorted(found) == [
        f"{tmp_path}/a-test/checkpoint/offsets/0 holds herring",
        f"{tmp_path}/a-test/report.txt holds swordfish",
    ]


def test_what_is_found_fails_the_run(tmp_path: Path) -> None:
    listening = CanaryLog("swordfish", "herring")

    with pytest.raises(pytest.fail.Exception, match=r"left.txt holds swordfish"), watching(tmp_path, listening):
        (tmp_path / "left.txt").write_text("swordfish")
    (tmp_path / "left.txt").unlink()
    with pytest.raises(pytest.fail.Exception, match="test_what_is_found_fails_the_run"), watching(tmp_path, listening):
        logging.getLogger("planted").error("herring")
