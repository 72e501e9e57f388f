"""The listening address of a process: `HOST:PORT`, and its socket."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass, replace
from ipaddress import ip_address

from penstock.errors import ConfigurationError
from penstock.options import PROCESS_VARIABLE

_FORM = re.compile(r"(?:(?P<host>[^\s:\[\]]+)|\[(?P<six>[0-9A-Fa-f:.]+)\]):(?P<port>[0-9]{1,5})", re.ASCII)
_LAST_PORT = 65_535
_BACKLOG = 128
#: Milliseconds without an acknowledgement after which the kernel drops a client's connection.
_UNACKNOWLEDGED_MS = 30_000


@dataclass(frozen=True, slots=True)
class Address:
    """A host and a port; port 0 is any free port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parse `HOST:PORT` or `[IPV6]:PORT`, or raise `ConfigurationError`."""
        found = _FORM.fullmatch(text)
        if found is None or int(found["port"]) > _LAST_PORT:
            raise ConfigurationError(
                f"{text!r} is no address to listen on; write HOST:PORT, as in 127.0.0.1:8400, or [::1]:8400"
            )
        return cls(found["host"] or found["six"], int(found["port"]))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def of_this_process(self) -> Address:
        """Return the address of this process under `penstock run --processes`: process 1 has the port itself.

        Raises:
            ConfigurationError: there is no such port.
        """
        number = int(os.environ.get(PROCESS_VARIABLE) or 1)
        if self.port == 0 or number == 1:
            return self
        if self.port + number - 1 > _LAST_PORT:
            raise ConfigurationError(
                f"process {number} would listen on port {self.port + number - 1}; give a lower one"
            )
        return replace(self, port=self.port + number - 1)

    def listen(self) -> socket.socket:
        """Return a listening socket.

        Raises:
            ConfigurationError: the address is not of this machine, or it is in use.
        """
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
                listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)
            listener.bind((self.host, self.port))
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            raise ConfigurationError(
                f"cannot listen on {self}: {error.strerror or error}; give --http another address"
            ) from error
        return listener
