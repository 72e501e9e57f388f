"""Names of topics for retries and dead letters that Kafka does not take: refused at start, with what to change."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock import App
from penstock.devbroker import DevBroker
from penstock.errors import ConfigurationError
from penstock.testing import TestApp

DEAD_LETTERS: dict[str, Any] = {"on_failure": "dead_letter"}


def app(name: str = "shop", servers: str = "127.0.0.1:1", **handlers: dict[str, Any]) -> App:
    made = App(name, bootstrap_servers=servers)
    for topic, options in handlers.items():
        made.handler(topic, **options)(lambda _message: None)
    return made


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("shop", DEAD_LETTERS, r"'dlq\.[^']*'.*; give the handler of .* another dead_letter_topic"),
        ("shop", {"retry_delays": [60]}, r"'retry\.shop\.[^']*'.*another name, or leave retry_delays out"),
        ("team billing", {"retry_delays": [60]}, r"'retry\.team billing\.[^']*60s'.*give the app another name"),
    ],
)
def test_a_name_that_kafka_does_not_take_is_refused_with_what_to_change(
    new_topic: Callable[..., str], broker: DevBroker, name: str, options: dict[str, Any], says: str
) -> None:
    # Kafka takes 249 characters.
    topic = new_topic() if " " in name else new_topic().ljust(248, "o")
    broker.create_topic(topic)

    with pytest.raises(ConfigurationError, match=says):
        app(name, broker.bootstrap_servers, **{topic: options}).start()
    with pytest.raises(ConfigurationError, match=says):
        TestApp(app(name, **{topic: options})).start()


def test_a_name_with_a_blank_is_no_matter_where_no_topic_has_it_in_its_name(
    new_topic: Callable[..., str], broker: DevBroker
) -> None:
    app("team billing", broker.bootstrap_servers, **{new_topic(): {}}).start().stop()


def test_dead_letters_that_collide_with_an_existing_topic_are_refused_with_the_option(
    broker: DevBroker, new_topic: Callable[..., str]
) -> None:
    topic = new_topic()
    broker.create_topic(f"dlq_{topic}")

    with pytest.raises(ConfigurationError, match=rf"dlq.{topic}'.*topic: dlq_{topic}.*another dead_letter_topic"):
        app(servers=broker.bootstrap_servers, **{topic: DEAD_LETTERS}).start()


def test_a_run_ends_with_code_2_instead_of_starting_its_processes_again(
    tmp_path: Path, new_topic: Callable[..., str], broker: DevBroker
) -> None:
    (tmp_path / "names_shop.py").write_text(
        f"import penstock\napp = penstock.App('team billing', bootstrap_servers={broker.bootstrap_servers!r})\n"
        f"app.handler({new_topic()!r}, retry_delays=[60])(print)\n"
    )

    command = [sys.executable, "-m", "penstock", "run", "names_shop:app", "--processes", "2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert done.returncode == 2, done.stderr
    assert "give the app another name" in done.stderr
