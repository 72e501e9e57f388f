"""The places of settings outside of the code, their order, and the errors about wrong ones."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.errors import ConfigurationError
from penstock.settings import OPTIONS, on_command_line, shown_value
from settings_tools import clean_settings

SERVERS = "in-the-code:9092"
#: Options that only code can give: objects, and what says which app it is.
IN_CODE = {"name", "dead_letter_limit", "middlewares", "telemetry"}


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    clean_settings(monkeypatch, tmp_path)
    return tmp_path


def app(**options: Any) -> penstock.App:
    given = {"workers": 1, "config": {"client.id": "code", "sasl.username": "u"}, **options}
    return penstock.App("sms", bootstrap_servers=SERVERS, **given)


def sparse_app() -> penstock.App:
    """Return an app whose code leaves all options out."""
    return penstock.App("sms", bootstrap_servers=SERVERS)


def test_every_option_of_an_app_can_be_set_outside_of_its_code_save_objects() -> None:
    assert set(OPTIONS) == set(inspect.signature(penstock.App).parameters) - IN_CODE


@pytest.mark.parametrize(
    ("option", "text", "value"),
    [
        ("workers", "' 7 '", 7),
        ("stop_timeout", "7", 7),
        ("stop_timeout", "7.5", 7.5),
        ("stop_timeout", "'7.5'", 7.5),
        ("pinned", "true", True),
        ("pinned", "'On'", True),
        ("pinned", "'no'", False),
        ("prefix", "'7'", "7"),
        ("config", "'client.id=a'", {"client.id": "a"}),
    ],
)
def test_a_setting_has_the_type_of_its_option_also_where_it_is_text(
    folder: Path, option: str, text: str, value: object
) -> None:
    (folder / "penstock.toml").write_text(f"{option} = {text}")

    found = sparse_app().effective[option]

    assert (found, type(found)) == (value, type(value))


def test_the_command_line_goes_before_the_environment_that_before_a_profile_the_code_and_a_file_that_lies_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "penstock.toml").write_text(
        "workers = 2\nprefix = 'file'\nbootstrap_servers = 'file:1'\npinned = true\n"
        "stall_after = 2\nmax_in_flight = 2\nmax_concurrency = 2\n"
        '[config]\n"client.id" = "file"\n"sasl.username" = "file"\n"socket.keepalive.enable" = true\n'
        "[profiles.production]\nstall_after = 3\nmax_in_flight = 3\nmax_concurrency = 3\n"
    )
    monkeypatch.setenv("PENSTOCK_PROFILE", "production")
    monkeypatch.setenv("PENSTOCK_MAX_IN_FLIGHT", "4")
    monkeypatch.setenv("PENSTOCK_MAX_CONCURRENCY", "4")
    monkeypatch.setenv("PENSTOCK_CONFIG", "client.id=environment")

    with on_command_line({"max_concurrency": "5", "bootstrap_servers": "b:1"}):
        # That it is the default makes no difference.
        made = app(prefix="penstock", stall_after=1.0, max_in_flight=1)
    after, left_out = app(), penstock.App("sms")

    found = made.effective
    names = ("workers", "pinned", "stall_after", "max_in_flight", "prefix", "max_concurrency")
    assert [found[name] for name in names] == [1, True, 3, 4, "penstock", 5]
    assert [left_out.effective[name] for name in names] == [2, True, 3, 4, "file", 4]
    assert found["config"] == {"client.id": "environment", "sasl.username": "u", "socket.keepalive.enable": True}
    assert made.bootstrap_servers == "b:1"
    assert {name: found.origin(name) for name in names[:5]} == {
        "workers": "the code",
        "pinned": "penstock.toml",
        "stall_after": "penstock.toml, profile production",
        "max_in_flight": "PENSTOCK_MAX_IN_FLIGHT",
        "prefix": "the code",
    }
    assert found.origin("bootstrap_servers") == "the command line"
    assert found.origin("config['client.id']") == "PENSTOCK_CONFIG"
    assert found.origin("config['sasl.username']") == "the code"
    assert (after.bootstrap_servers, left_out.bootstrap_servers) == (SERVERS, "file:1")


def test_an_app_whose_brokers_stand_nowhere_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigurationError, match="bootstrap_servers of app sms are given nowhere; give App"):
        penstock.App("sms")


@pytest.mark.parametrize("option", ["coordinator", "report"])
def test_what_the_code_gives_with_arguments_of_its_own_is_switched_off_and_on_outside(
    option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = penstock.Coordinator(bootstrap_servers=SERVERS)
    own = {"coordinator": coordinator, "report": penstock.ReportSettings(interval=5)}[option]
    found = []
    for value in ("false", "true", "1"):
        monkeypatch.setenv(f"PENSTOCK_{option.upper()}", value)
        given = {option: False if value == "1" else own}
        found.append(penstock.App("sms", bootstrap_servers=SERVERS, **given).effective[option])

    assert found == [False, own, True]


def test_a_table_of_pyproject_is_read_where_no_file_of_its_own_is_and_a_variable_names_a_file_elsewhere(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "pyproject.toml").write_text("[project]\nname='a'\n[tool.penstock]\nworkers = 7\nreport = true\n")
    in_project = sparse_app()
    (folder / "penstock.toml").write_text("")
    in_own_file = sparse_app()
    (folder / "elsewhere.toml").write_text("workers = 8\n")
    monkeypatch.setenv("PENSTOCK_SETTINGS", str(folder / "elsewhere.toml"))

    assert (in_project.effective["workers"], in_project.report) == (7, penstock.ReportSettings())
    assert (in_own_file.effective["workers"], in_own_file.report) == (16, None)
    assert app().effective["workers"] == 8, "it overrides the code, because the file was named"


@pytest.mark.parametrize(
    ("text", "variables", "said"),
    [
        ("worker = 3", {}, "penstock.toml: worker is no setting; did you mean workers?"),
        ("zebra = 3", {}, "zebra is no setting; settings are bootstrap_servers, workers"),
        ("workers = 'many'", {}, "penstock.toml: workers is wrong; it takes: whole number"),
        ("workers = true", {}, "workers is wrong; it takes: whole number"),
        ("workers = 1.5", {}, "workers is wrong; it takes: whole number"),
        ("pinned = 1", {}, "pinned is wrong; it takes: true or false"),
        ("prefix = 7", {}, "prefix is wrong; it takes: text"),
        ("config = 7", {}, "config is wrong; it takes: table"),
        ("workers = 0", {}, "workers must be a whole number of at least 1, but is 0 (from penstock.toml)"),
        ("max_parked = 3", {}, "penstock.toml: max_parked is no setting any more: max_in_flight limits"),
        ("", {"PENSTOCK_MAX_PARKED": "3"}, "PENSTOCK_MAX_PARKED is no setting any more: max_in_flight limits"),
        ("workers = = 0", {}, "penstock.toml is no TOML; correct it (at line 1"),
        ("[config]\n'a.b' = ['canary']", {}, "config['a.b'] is wrong: it should be text, a number, true or false"),
        ("[config]\n'group.id' = 'a'", {}, "(from penstock.toml)"),
        ("[profiles.test]\nworkres = 1", {}, "penstock.toml, profile test: workres is no setting; did you mean"),
        ("[profiles.test]", {"PENSTOCK_PROFILE": "tset"}, "tset, which PENSTOCK_PROFILE names; did you mean test?"),
        ("", {"PENSTOCK_PROFILE": "test"}, "write a table [profiles.test], or leave it out"),
        ("", {"PENSTOCK_WORKER": "3"}, "PENSTOCK_WORKER is no setting; did you mean PENSTOCK_WORKERS?"),
        ("", {"PENSTOCK_WORKERS": "canary"}, "PENSTOCK_WORKERS: workers is wrong; it takes: whole number"),
        ("", {"PENSTOCK_CONFIG": "canary"}, "PENSTOCK_CONFIG takes NAME=VALUE, but number 1 of them is not so"),
        ("", {"PENSTOCK_CONFIG": "{canary"}, "PENSTOCK_CONFIG begins as a JSON object, but is none"),
        ("", {"PENSTOCK_SETTINGS": "absent.toml"}, "FileNotFoundError; correct the file, or PENSTOCK_SETTINGS"),
        ("# \udcff", {}, "penstock.toml cannot be read: UnicodeDecodeError; make it readable"),
    ],
)
def test_a_wrong_setting_is_named_with_its_place_and_the_remedy_and_without_its_value(
    folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, variables: dict[str, str], said: str
) -> None:
    (folder / "penstock.toml").write_text(text, errors="surrogateescape")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    with pytest.raises(ConfigurationError) as caught:
        sparse_app()

    assert said in str(caught.value)
    assert "canary" not in str(caught.value)


def test_variables_of_others_that_begin_alike_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    # Kubernetes makes such ones for a service that is called penstock.
    monkeypatch.setenv("PENSTOCK_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("PENSTOCK_PORT_8400_TCP", "tcp://10.0.0.1:8400")

    assert app().effective.origins == {}


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("sasl.password", "canary", "***"),
        ("ssl.key.password", "canary", "***"),
        ("ssl.key.pem", "canary", "***"),
        ("sasl.oauthbearer.client.secret", "canary", "***"),
        ("basic.auth.user.info", "canary", "***"),
        ("oauth_cb", len, "<builtin_function_or_method>"),
        ("sasl.username", "shop", "shop"),
        ("ssl.ca.location", "ca.pem", "ca.pem"),
        ("some.url", "https://user:canary@host/", "https://***@host/"),
    ],
)
def test_secrets_are_not_shown(name: str, value: object, shown: str) -> None:
    assert shown_value(name, value) == shown
