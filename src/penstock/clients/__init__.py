"""Kafka clients: made here, all of them, from the one configuration that a user gives."""

from penstock.clients.factory import ClientRefusedError, admin, consumer, producer
from penstock.clients.tokens import portable, require_travelling

__all__ = ["ClientRefusedError", "admin", "consumer", "portable", "producer", "require_travelling"]
