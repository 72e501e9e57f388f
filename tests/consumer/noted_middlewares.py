"""Middlewares that note what they see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.consumer import CallNext
from penstock.message import Message


def noted(name: str, log: list[str]) -> Callable[[Any, CallNext], object]:
    """Return a middleware that writes down when it begins and how it ends."""

    def middleware(message: Any, call_next: CallNext) -> object:
        log.append(f"{name} begins")
        try:
            return call_next(message)
        except BaseException as error:
            log.append(f"{name} sees {error!r}")
            raise
        finally:
            log.append(f"{name} ends")

    return middleware


async def takes_async(_message: Message) -> None: ...


def takes(_message: Message) -> None: ...
