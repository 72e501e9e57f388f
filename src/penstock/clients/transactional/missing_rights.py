"""Which rights a coordinator or a store lacks now: said in the log, and kept for those who look."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from confluent_kafka import Consumer

from penstock.clients.kafka_errors import concerns_a_group
from penstock.clients.ration import once_in, rationed
from penstock.clients.rights import Right, lacking_text, missing_right_text, principal_of
from penstock.options import ClientConfig

_log = rationed("penstock.transactions")

#: Errors of a consumer that are looked through, and seconds for that.
_HEARD = 10
_ERRORS_BUDGET_S = 0.1
#: Seconds between two log lines that say the same.
_LOG_INTERVAL_S = 30.0
#: Seconds after which a right that was not missed again counts as given.
_FORGET_AFTER_S = 90.0


class MissingRights:
    """The rights that one component lacks now, by what it was refused lately. Thread-safe.

    Each refusal is logged, the same one now and then only. One that is not met again counts as given after a while, or
    at once where the component says that what it was refused works. `config` tells who it is.
    """

    def __init__(self, config: ClientConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._principal = principal_of(config)
        self._clock = clock
        # Guards what follows.
        self._lock = threading.Lock()
        # By right: since when it is missed, when it was last, and the sentence that tells so.
        self._missed: dict[Right, tuple[float, float, str]] = {}

    def refused(self, what: str, *rights: Right) -> str:
        """Take in that something was refused for want of rights; return the sentence that tells so.

        `what` was tried; it is the beginning of the sentence.
        """
        text, now = missing_right_text(what, rights, self._principal), self._clock()
        with self._lock:
            since = [self._missed[right][0] if right in self._missed else now for right in rights]
            self._missed.update({right: (at, now, text) for right, at in zip(rights, since, strict=True)})
        # A right that was given in between is missed since another time: then this is another line.
        kind = (self, text, *since)
        _log.error("%s; it goes on by itself once that is done", text, extra=once_in(_LOG_INTERVAL_S, kind, now))
        return text

    def lacks(self, *rights: Right) -> str:
        """Return the part of a sentence that tells that these are missing, for where others note and log it."""
        return lacking_text(rights, self._principal)

    def granted(self, *rights: Right) -> None:
        """Take in that what was refused for want of these works now; the next refusal is logged at once."""
        if self._missed:
            with self._lock:
                for right in rights:
                    self._missed.pop(right, None)

    def missing(self) -> dict[str, str]:
        """Return what is missing: rights as they stand in a sentence, each with what is refused and what gives it."""
        now = self._clock()
        with self._lock:
            self._missed = {
                right: missed for right, missed in self._missed.items() if now - missed[1] < _FORGET_AFTER_S
            }
            return {str(right): text for right, (_, _, text) in self._missed.items()}


def is_group_forbidden(consumer: Consumer) -> bool:
    """Tell whether a consumer has heard that its group is forbidden: questions for positions only time out then.

    The answer to its search for the group's coordinator comes among the messages, so it must be one that reads nothing
    now. (To ask an admin client about the group would be plainer, but while brokers are away librdkafka 2.16 ends the
    process in that: an assertion on `eonce->refcnt`.)
    """
    heard = (message.error() for message in consumer.consume(_HEARD, _ERRORS_BUDGET_S))
    return any(error is not None and concerns_a_group(error) for error in heard)
