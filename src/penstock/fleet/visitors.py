"""Which requests are answered: by the address they name, and by the page that makes them in somebody's browser."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from penstock.errors import ConfigurationError
from penstock.fleet.address import Address

if TYPE_CHECKING:
    from starlette.requests import Request


@dataclass(frozen=True, slots=True)
class Visitors:
    """Judges requests. Without state.

    Attributes:
        is_loopback: whether the server listens to this machine alone.
        public_url: the page's address at a reverse proxy, as browsers see it; None: there is no proxy. What the proxy
            says of who asks (`X-Forwarded-For`) counts only where it is given.

    Raises:
        ConfigurationError: the address is no http(s) URL.
    """

    is_loopback: bool
    public_url: str | None = None
    #: Scheme, host and port of it.
    _public_origin: tuple[str, str] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        """Read the address."""
        if self.public_url is None:
            return
        parts = urlsplit(self.public_url)
        if parts.scheme not in {"http", "https"} or not parts.netloc or parts.username is not None:
            raise ConfigurationError(
                f"--public-url {self.public_url!r} is no address of a page; write it as browsers see it: "
                "https://HOST/PATH/"
            )
        object.__setattr__(self, "_public_origin", (parts.scheme, parts.netloc.lower()))

    def may_read(self, request: Request) -> bool:
        """Tell whether a request names an address of this server.

        A page of another site may have its own name resolve to the loopback address, and would then read what is here;
        but its requests name that site.
        """
        if not self.is_loopback or Address(request.url.hostname or "", 0).is_loopback:
            return True
        return self._public_origin is not None and _host(request) == self._public_origin[1]

    def is_own_page(self, request: Request) -> bool:
        """Tell whether a request was made by this page, or by no page at all."""
        if request.headers.get("sec-fetch-site", "none") not in {"none", "same-origin"}:
            return False
        origin = request.headers.get("origin")
        if origin is None:
            return True
        parts = urlsplit(origin)
        made_by = (parts.scheme, parts.netloc.lower())
        return made_by[1] == _host(request) or made_by == self._public_origin

    def client(self, request: Request) -> str:
        """Return the address of who asks: behind a proxy, the one that the proxy itself saw."""
        seen = request.headers.get("x-forwarded-for", "") if self.public_url is not None else ""
        direct = "somewhere" if request.client is None else request.client.host
        return seen.rpartition(",")[2].strip() or direct


def _host(request: Request) -> str:
    return request.headers.get("host", "").lower()
