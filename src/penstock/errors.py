"""Every error penstock raises, so that a caller can catch the root or the kind.

Each message answers three questions: what happened, to which topic, partition, offset or transaction, and
what to do next. Payloads, keys and secrets never appear in one.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping


class PenstockError(Exception):
    """The root of penstock's errors."""


class ConfigurationError(PenstockError, ValueError):
    """An option, a handler or a setting is wrong; nothing was started."""


class BrokerConnectionError(PenstockError, ConnectionError):
    """No broker answered in time at the given addresses."""


class StoreConnectionError(PenstockError, ConnectionError):
    """The database of a store did not answer."""


class RegistryConnectionError(PenstockError, ConnectionError):
    """A schema registry was not reached, or could not answer; the value itself may be good."""


class TopicNotFoundError(PenstockError, LookupError):
    """A topic that must exist does not."""


class MessageFormatError(PenstockError, ValueError):
    """The bytes of a record, header or metadata cannot be what they claim to be."""


class StoppedError(PenstockError, RuntimeError):
    """The object was stopped, or stopped itself; the cause, where there is one, is chained."""


class RetryLater(PenstockError):  # noqa: N818 - it asks for something, it reports no error
    """Raised by a handler: try this message again after so many seconds, whatever the policy's waits are.

    It counts as a try, whichever failures the policy retries; when to give up is still for the policy's `stop`.

    Args:
        seconds: how long to wait, at least; a negative number counts as 0.

    Raises:
        ConfigurationError: that is no finite number.
    """

    def __init__(self, seconds: float) -> None:
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not math.isfinite(seconds):
            raise ConfigurationError(
                f"RetryLater takes a number of seconds, but was given {seconds!r}; to hold a handler's messages until "
                "further notice use change_handler(topic, rate=0)"
            )
        super().__init__(f"try again in {seconds:g} s")
        self.seconds = max(0.0, float(seconds))


class BatchError(PenstockError):
    """Raised by a batch handler: these messages of the batch failed, the others are done.

    Of each line (a key, or with `order="partition"` a partition) the messages behind the first failed one are handed
    over once more, after it, so that the order holds; with `order="none"` only the failed ones are.

    Args:
        failed: what each failed message ended with, by its place in the list that the handler got.
    """

    def __init__(self, failed: Mapping[int, BaseException]) -> None:
        super().__init__(f"{len(failed)} messages of a batch failed")
        self.failed = dict(failed)


class GivenUpError(PenstockError):
    """What a dead letter died of that somebody had given up: its tries were not exhausted, or its handler held it."""

    def __init__(self, place: str, tries: int, failed_with: str) -> None:
        last = f", the last of which failed with {failed_with}" if failed_with else ""
        super().__init__(f"{place} was given up by request after {tries} tries{last}")


class HandlerTimeLimitError(BaseException):
    """A handler took longer than its `time_limit`: a failure of its message, which the retry policy sees as any other.

    Raised within a plain handler, at whatever it is doing; an `async def` handler is cancelled instead. As for
    cancelling, `except Exception` does not catch it: a loop that survives all errors would survive this one. `finally`
    and `with` clean up. A handler that catches it and returns has done its work.
    """

    def __init__(self, text: str = "the handler took longer than its time_limit") -> None:
        super().__init__(text)


class WorkersBlockedError(PenstockError, RuntimeError):
    """Half of the worker threads are in handlers that do not return: the process must be started again.

    `penstock run` ends with exit code 4 then. The messages that blocked them are given up, so they do not come again.
    """


class NotGivenUpError(PenstockError):
    """A message was not given up; the text says where it is, and what can be done.

    Attributes:
        is_under_way: whether it will be, once its dead-letter topic takes it.
    """

    def __init__(self, text: str, *, is_under_way: bool = False) -> None:
        super().__init__(text)
        self.is_under_way = is_under_way


class TransactionError(PenstockError, RuntimeError):
    """A transactional message could not be taken to the state that was asked for."""


class HalfNotStoredError(TransactionError):
    """The half message is not known to be durable, so the local transaction did not run."""


class DecisionNotStoredError(TransactionError):
    """The decision is not known to be durable; a check of the producer group settles it, or an operator."""


class TransactionRefusedError(TransactionError):
    """A decision stands already that forbids what was asked for; the local transaction must not commit."""


class StoreInUseError(PenstockError, RuntimeError):
    """Another process holds the store; one at a time can have it."""


class StoreDamagedError(PenstockError, RuntimeError):
    """What a store had acknowledged is missing or no longer reads; it was not opened, and nothing was changed."""


class StoreFailedError(PenstockError, OSError):
    """A store's disk failed; the store takes nothing more; what it acknowledged is there when it is opened again."""


class PublicationNotSeenError(TransactionError):
    """The decision is stored, but the message was not seen to be visible in time; it will be, unless it was refused."""


class BufferFullError(TransactionError):
    """As many transactions are in flight as the producer may hold; nothing of this one was sent."""


class SinkError(PenstockError, RuntimeError):
    """A Spark sink refused a batch; nothing of the batch was stored."""


class SourceError(PenstockError, RuntimeError):
    """The Spark source could not read what it was asked for."""


class DevBrokerError(PenstockError, RuntimeError):
    """The embedded broker, or what it needs, could not be started."""


def class_name(error: BaseException) -> str:
    """Return an exception's class, with its module unless it is a builtin."""
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and what it was raised from, each once: a chain may be a circle."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__


def raised() -> BaseException:
    """Return what a bare `except:` has caught, as an exception.

    The client library's `KafkaError` descends from `object` alone, and yet it can be raised: by the library out of the
    callbacks of a poll, and by a user's `raise message.error()`. `except BaseException` lets it pass, and neither
    logging nor a traceback can show it. So where a thread begins, and where users' code is called, stands a bare
    `except:`.
    """
    error: object = sys.exc_info()[1]
    if isinstance(error, BaseException):
        return error
    wrapped = PenstockError(
        f"{error} was raised, which is no exception; where your own code raises it, write `raise KafkaException(error)`"
    )
    # What was caught would stand as its context, and no traceback could be printed.
    wrapped.__suppress_context__ = True
    return wrapped


__all__ = [
    "BatchError",
    "BrokerConnectionError",
    "BufferFullError",
    "ConfigurationError",
    "DecisionNotStoredError",
    "DevBrokerError",
    "GivenUpError",
    "HalfNotStoredError",
    "HandlerTimeLimitError",
    "MessageFormatError",
    "NotGivenUpError",
    "PenstockError",
    "PublicationNotSeenError",
    "RegistryConnectionError",
    "RetryLater",
    "SinkError",
    "SourceError",
    "StoppedError",
    "StoreConnectionError",
    "StoreDamagedError",
    "StoreFailedError",
    "StoreInUseError",
    "TopicNotFoundError",
    "TransactionError",
    "TransactionRefusedError",
    "WorkersBlockedError",
    "raised",
]
