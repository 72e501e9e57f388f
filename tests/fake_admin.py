"""What penstock uses of an admin client besides its questions; a test adds those that it answers."""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar

from penstock.clients.client_log import ClientWords


class FakeAdmin:
    """An admin client of brokers that a test plays."""

    servers = "127.0.0.1:1"
    config: ClassVar[dict[str, Any]] = {}
    replication_factor: int | None = None

    @cached_property
    def words(self) -> ClientWords:
        """What the client said last: nothing."""
        return ClientWords({}, None)

    def poll(self, _timeout: float) -> int:
        """Serve nothing."""
        return 0
