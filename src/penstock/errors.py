"""All errors of penstock: one root, and a class for each kind that a caller may catch.

Each message says what happened, to which topic, partition, offset or transaction, and what to do next. Payloads, keys
and secrets never appear in it.
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
    """A schema registry was not reached, or could not answer; the value itself may be valid."""


class TopicNotFoundError(PenstockError, LookupError):
    """A topic that must exist does not."""


class MessageFormatError(PenstockError, ValueError):
    """The bytes of a record, header or metadata cannot be what they claim to be."""


class StoppedError(PenstockError, RuntimeError):
    """The object was stopped, or stopped itself; its cause, if any, is chained."""


class RetryLater(PenstockError):  # noqa: N818 - it asks for something, it reports no error
    """Raised by a handler: try this message again after some seconds, instead of the policy's wait.

    It counts as a try, and is retried whatever the policy's `retry` says of failures. The policy's `stop` still decides
    when to give up.

    Args:
        seconds: least time to wait; a negative number counts as 0.

    Raises:
        ConfigurationError: `seconds` is no finite number.
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

    To keep the order, messages behind the first failed one of their key (with `order="partition"`: of their partition)
    are handed over again, after it. With `order="none"`, only the failed ones are.

    Args:
        failed: the error of each failed message, by its index in the handler's list.
    """

    def __init__(self, failed: Mapping[int, BaseException]) -> None:
        super().__init__(f"{len(failed)} message{'' if len(failed) == 1 else 's'} of a batch failed")
        self.failed = dict(failed)


class GivenUpError(PenstockError):
    """The error in a dead letter of a message that was given up by request: before its last try, or while held."""

    def __init__(self, place: str, tries: int, failed_with: str) -> None:
        last = f", the last of which failed with {failed_with}" if failed_with else ""
        super().__init__(f"{place} was given up by request after {tries} {'try' if tries == 1 else 'tries'}{last}")


class HandlerTimeLimitError(BaseException):
    """A handler took longer than its `time_limit`. It is a failure of the message, and the retry policy applies.

    It is raised inside a plain handler, at its present line. An `async def` handler is cancelled instead. Like a
    cancellation, `except Exception` does not catch it: otherwise a loop that survives all errors would survive this
    one. `finally` and `with` clean up. If a handler catches it and returns, the message is done.
    """

    def __init__(self, text: str = "the handler took longer than its time_limit") -> None:
        super().__init__(text)


class WorkersBlockedError(PenstockError, RuntimeError):
    """Half of the worker threads are in handlers that do not return: the process must be restarted.

    `penstock run` ends with exit code 4 then. The messages in these handlers were given up, so they do not come again.
    """


class NotGivenUpError(PenstockError):
    """A message was not given up. The text says where it is and what to do.

    Attributes:
        is_under_way: whether it will still be given up, once its dead-letter topic has stored it.
    """

    def __init__(self, text: str, *, is_under_way: bool = False) -> None:
        super().__init__(text)
        self.is_under_way = is_under_way


class TransactionError(PenstockError, RuntimeError):
    """A transactional message could not be brought to the requested state."""


class HalfNotStoredError(TransactionError):
    """The half message is not known to be durable, so the local transaction did not run."""


class DecisionNotStoredError(TransactionError):
    """The decision is not known to be durable. A check of the producer group or an operator settles it."""


class TransactionRefusedError(TransactionError):
    """An earlier decision forbids the request; the local transaction must not commit."""


class StoreInUseError(PenstockError, RuntimeError):
    """Another process holds the store. Only one process at a time can open it."""


class StoreDamagedError(PenstockError, RuntimeError):
    """Acknowledged records of a store are missing or unreadable. It was not opened, and nothing was changed."""


class StoreFailedError(PenstockError, OSError):
    """A store's disk failed, and the store accepts nothing more. Acknowledged records are kept for the next opening."""


class PublicationNotSeenError(TransactionError):
    """The decision is stored, but the message did not become visible in time. It will, unless its topic refuses it."""


class BufferFullError(TransactionError):
    """The producer has the most transactions in flight that it may have. Nothing of this one was sent."""


class SinkError(PenstockError, RuntimeError):
    """A Spark sink refused a batch; nothing of the batch was stored."""


class SourceError(PenstockError, RuntimeError):
    """The Spark source could not read the requested offsets."""


class DevBrokerError(PenstockError, RuntimeError):
    """The embedded broker, or something that it needs, could not be started."""


def class_name(error: BaseException) -> str:
    """Return an exception's class, with its module unless it is a builtin."""
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and its chain of causes, each once: a chain may be circular."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__


def raised() -> BaseException:
    """Return the exception that a bare `except:` caught.

    The client library's `KafkaError` is no exception class, but it can be raised: by the library out of callbacks of a
    poll, and by a user's `raise message.error()`. `except BaseException` does not catch it, and neither logging nor a
    traceback can show it. So the top of each thread, and each call of users' code, has a bare `except:`.
    """
    error: object = sys.exc_info()[1]
    if isinstance(error, BaseException):
        return error
    wrapped = PenstockError(
        f"{error} was raised, which is no exception; where your own code raises it, write `raise KafkaException(error)`"
    )
    # With the caught object as its context, no traceback could be printed.
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
