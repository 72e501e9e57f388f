"""Client settings as text: lines of NAME=VALUE, or a JSON object; and which values may be shown."""

from __future__ import annotations

import json
import re

from penstock.errors import ConfigurationError

#: Replaces a hidden value.
HIDDEN = "***"

_SECRET = re.compile(
    r"password|secret|token|credential|jaas|user\.info|assertion|private|\.pem$|key\.string|keystore|oauthbearer\.config"
    r"|conf(ig)?\.provider|authorization",
    re.IGNORECASE,
)
_USER_IN_URL = re.compile(r"(//)[^/@\s]+@")


def client_settings_text(text: str, place: str) -> dict[str, str]:
    """Parse a text; `ConfigurationError` that names `place` if it is neither lines nor JSON.

    The error repeats no value.
    """
    if text.lstrip().startswith("{"):
        try:
            found = json.loads(text)
        except ValueError:
            raise ConfigurationError(f"{place} begins as a JSON object, but is none; correct it") from None
        return {str(name): client_value(value) for name, value in found.items()}
    lines = ((number, line.strip()) for number, line in enumerate(text.splitlines(), 1))
    return dict(name_and_value(line, place, number) for number, line in lines if line and not line.startswith("#"))


def name_and_value(text: str, place: str, number: int) -> tuple[str, str]:
    """Return name and value of NAME=VALUE, the `number`th at `place`."""
    name, equals, value = text.partition("=")
    if not name.strip() or not equals:
        raise ConfigurationError(
            f"{place} takes NAME=VALUE, but number {number} of them is not so; write security.protocol=SASL_SSL"
        )
    return name.strip(), value if place == "--config" else value.strip()


def client_value(value: object) -> str:
    """Return a value as text for the client library: true and false as in JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def shown_value(name: str, value: object) -> str:
    """Return a client setting's value for printing.

    Values with secret names are hidden. For objects and functions only the type is shown.
    """
    if _SECRET.search(name):
        return HIDDEN
    if not isinstance(value, str | int | float | bool):
        return f"<{type(value).__name__}>"
    return _USER_IN_URL.sub(rf"\1{HIDDEN}@", str(value))
