"""Kafka clients: made here, all of them, from the one configuration that a user gives."""

from penstock.clients.making import admin, consumer, log_of, producer

__all__ = ["admin", "consumer", "log_of", "producer"]
