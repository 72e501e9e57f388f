"""The parts of an admin client that penstock uses besides its requests; a test adds the requests."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any

from penstock.clients.client_log import ClientWords


class FakeAdmin:
    """An admin client of brokers that a test plays."""

    servers = "127.0.0.1:1"
    config: Mapping[str, Any] = MappingProxyType({})
    replication_factor: int | None = None

    @cached_property
    def words(self) -> ClientWords:
        """The last log lines of the client: none."""
        return ClientWords({}, None)

    def poll(self, _timeout: float) -> int:
        """Serve nothing."""
        return 0
