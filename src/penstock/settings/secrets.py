"""Which settings of the Kafka clients may be shown."""

from __future__ import annotations

import re

#: What stands for a value that is not shown.
HIDDEN = "***"

_SECRET = re.compile(
    r"password|secret|token|credential|jaas|user\.info|assertion|private|\.pem$|key\.string|keystore|oauthbearer\.config"
    r"|conf(ig)?\.provider|authorization",
    re.IGNORECASE,
)
_USER_IN_URL = re.compile(r"(//)[^/@\s]+@")


def shown_value(name: str, value: object) -> str:
    """Return a client setting's value as it may be printed.

    Hidden is what is secret by its name, and what is no plain value: a function may show anything.
    """
    if _SECRET.search(name):
        return HIDDEN
    if not isinstance(value, str | int | float | bool):
        return f"<{type(value).__name__}>"
    return _USER_IN_URL.sub(rf"\1{HIDDEN}@", str(value))
