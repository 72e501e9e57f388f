"""The permissions that a coordinator or a store lacks now: logged, and kept for status reports."""

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

#: Most errors of a consumer to look at, and the seconds for it.
_HEARD = 10
_ERRORS_BUDGET_S = 0.1
#: Seconds between two equal log lines.
_LOG_INTERVAL_S = 30.0
#: Seconds after the last refusal until a permission counts as given.
_FORGET_AFTER_S = 90.0


class MissingRights:
    """The permissions that one component lacks now, by its recent refusals. Thread-safe.

    Each refusal is logged, repeated ones at intervals only. A permission counts as given when the component reports a
    success, or some time after the last refusal. `config` names the principal.
    """

    def __init__(self, config: ClientConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._principal = principal_of(config)
        self._clock = clock
        # Guards what follows.
        self._lock = threading.Lock()
        # By permission: the time of the first and of the last refusal, and the sentence for it.
        self._missed: dict[Right, tuple[float, float, str]] = {}

    def refused(self, what: str, *rights: Right) -> str:
        """Note a refusal for want of permissions, and return the sentence for it, which begins with `what`."""
        text, now = missing_right_text(what, rights, self._principal), self._clock()
        with self._lock:
            since = [self._missed[right][0] if right in self._missed else now for right in rights]
            self._missed.update({right: (at, now, text) for right, at in zip(rights, since, strict=True)})
        # A permission that was given in between has a new first refusal: then this is a new line.
        kind = (self, text, *since)
        _log.error("%s; it goes on by itself once that is done", text, extra=once_in(_LOG_INTERVAL_S, kind, now))
        return text

    def lacks(self, *rights: Right) -> str:
        """Return the end of a sentence that these are missing. The caller notes and logs it."""
        return lacking_text(rights, self._principal)

    def granted(self, *rights: Right) -> None:
        """Note that these permissions are given now. Their next refusal is logged at once."""
        if self._missed:
            with self._lock:
                for right in rights:
                    self._missed.pop(right, None)

    def missing(self) -> dict[str, str]:
        """Return the missing permissions as text, each with its sentence: what is refused, and the command."""
        now = self._clock()
        with self._lock:
            self._missed = {
                right: missed for right, missed in self._missed.items() if now - missed[1] < _FORGET_AFTER_S
            }
            return {str(right): text for right, (_, _, text) in self._missed.items()}


def is_group_forbidden(consumer: Consumer) -> bool:
    """Tell whether a consumer received that its group is forbidden. Requests for positions only time out then.

    The broker's refusal arrives among the messages, so the consumer must not be reading now. (Asking an admin client
    would be simpler, but while brokers are away librdkafka 2.16 ends the process: an assertion on `eonce->refcnt`.)
    """
    heard = (message.error() for message in consumer.consume(_HEARD, _ERRORS_BUDGET_S))
    return any(error is not None and concerns_a_group(error) for error in heard)
