"""Handlers and policies that several tests of tasks need."""

from __future__ import annotations

from typing import Any

from penstock.consumer import retry
from penstock.message import Message

ONCE = retry(1)


def quickly(attempts: int = 3) -> Any:
    return retry(attempts, wait=lambda _: 0.001)


def failing(message: Message) -> None:
    raise ValueError(f"no use for {message.offset}")
