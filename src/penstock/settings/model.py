"""The options of an app that can be set outside of its code, with their types. Imported where one is.

Objects (`telemetry`, `middlewares`, `dead_letter_limit`) and the name, which says what the app is, stay in the code.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict
from pydantic_settings.sources import EnvSettingsSource

from penstock.settings.text import client_settings_text

PREFIX = "PENSTOCK_"


def _client_settings(given: Any) -> Any:
    """Read text, and leave a table as it is; what is wrong is raised as it is: pydantic takes `ValueError` alone."""
    return client_settings_text(given, f"{PREFIX}CONFIG") if isinstance(given, str) else given


class Options(BaseSettings):
    """One layer of settings: what it does not name stays None."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", hide_input_in_errors=True)

    bootstrap_servers: str | None = None
    workers: int | None = None
    max_concurrency: int | None = None
    config: Annotated[dict[str, str | bool | int | float] | None, NoDecode, BeforeValidator(_client_settings)] = None
    coordinator: bool | None = None
    prefix: str | None = None
    pinned: bool | None = None
    one_core: bool | None = None
    max_in_flight: int | None = None
    max_in_flight_bytes: int | None = None
    max_parked: int | None = None
    max_parked_bytes: int | None = None
    commit_interval: float | None = None
    stop_timeout: float | None = None
    revoke_timeout: float | None = None
    stall_after: float | None = None
    exactly_once: bool | None = None
    transaction_interval: float | None = None
    exception_texts: bool | None = None
    report: bool | None = None
    commands: bool | None = None

    @classmethod
    def settings_customise_sources(cls, *_args: Any, **sources: Any) -> tuple[Any, ...]:
        """Take one layer at a time, so that each value's origin is known: `sources.layers` puts them together."""
        return (sources["init_settings"],)


def from_environment() -> dict[str, Any]:
    """Return what the environment says, as text."""
    return EnvSettingsSource(Options)()
