"""What can take messages now: brokers that answer, topics that exist, and targets that refused nothing lately.

After a failure nothing is published before the brokers that a Kafka transaction needs have answered. The list of topics
is fetched by a thread of its own. Nobody waits for either: each question has a time limit, on a thread that can be left
behind, since the client library waits for a group's coordinator without end in the midst of a Kafka transaction.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from confluent_kafka import KafkaException

from penstock.clients.bounded_calls import BackgroundCall, LeftBehind, NotAnsweredError
from penstock.clients.factory import AdminClient
from penstock.clients.kafka_errors import reason
from penstock.clients.rights import Operation, topic_right
from penstock.clients.topics import hidden_topics, partition_counts
from penstock.clients.transactional.missing_rights import MissingRights
from penstock.errors import PenstockError
from penstock.transactions.core.pending import Pending
from penstock.transactions.core.quarantine import TargetQuarantine
from penstock.transactions.publishing.flight import Backlog, GroupCommit
from penstock.transactions.publishing.publisher import NotPublishedError
from penstock.transactions.rationed_log import RationedLog
from penstock.transactions.wire.ops import Verdict

_log = logging.getLogger("penstock.transactions")

#: Seconds for one question, and between two.
_QUESTION_LIMIT_S = 5.0
_RETRY_DELAY_S = 0.2


# A member of an enumeration is slow to look up, and this is the way of every transaction.
_DISCARD = Verdict.DISCARD


class BrokerGate:
    """Open as long as nothing failed, and from an answer on. Used by one thread; waits for nothing.

    `ask` returns once the brokers have answered, or raises `KafkaException`.
    """

    def __init__(self, ask: Callable[[], object], left: LeftBehind) -> None:
        self._ask = ask
        self._left = left
        self._question: BackgroundCall[bool] | None = None
        self._not_before = 0.0
        #: Whether transactions may begin.
        self.is_open = True

    def shut(self) -> None:
        """Something failed: ask, before anything is tried again."""
        self.is_open = False

    def poll(self, now: float) -> bool:
        """Ask, if it is shut, and take the answer; tell whether it has opened now."""
        if self._question is None:
            if not self.is_open and now >= self._not_before:
                self._question = BackgroundCall(
                    "asking whether brokers answer", self._answered, _QUESTION_LIMIT_S, self._left
                )
            return False
        try:
            has_answered = self._question.answer() is not None
        except (KafkaException, NotAnsweredError) as error:
            text = reason(error) if isinstance(error, KafkaException) else error
            _log.debug("the brokers do not answer: %s", text)
            self._question, self._not_before = None, now + _RETRY_DELAY_S
            return False
        if has_answered:
            self._question, self.is_open = None, True
        return has_answered

    def _answered(self) -> bool:
        self._ask()
        return True


#: Seconds between two questions for the list of topics.
_METADATA_INTERVAL_S = 1.0
#: Seconds between two looks where nobody misses a topic.
_IDLE_METADATA_INTERVAL_S = 5.0

#: Missing topics that are asked for by name, in one round.
_ASKED_FOR = 20
#: Seconds in which brokers shall answer.
_ANSWER_S = 5.0

#: Why a topic cannot take a message that nobody has heard of yet: the list that comes next may have it.
NOT_KNOWN = "is not known yet"


class Targets:
    """The targets of one coordinator. Used by its thread, save for the looks; times are monotonic seconds.

    `ask` returns the partitions of every topic, or raises `PenstockError`; `hidden`, of topics that are not in the
    list, those that may not be seen, each with what is missing for it. Both may take seconds.
    """

    def __init__(
        self,
        ask: Callable[[], Mapping[str, int]],
        name: str,
        hidden: Callable[[Sequence[str]], Mapping[str, str]] = lambda _: {},
    ) -> None:
        self._ask = ask
        self._name = name
        self._ask_hidden = hidden
        # As the counts: topics that may not be seen.
        self._hidden: Mapping[str, str] = {}
        # Replaced as a whole by the thread that asks, read by the coordinator's.
        self._counts: Mapping[str, int] = {}
        # Lists that arrived, changed or not; and by topic how many had, when it was first not found.
        self._lists = 0
        self._missed: dict[str, int] = {}
        self._asked = -_METADATA_INTERVAL_S
        # Set while a thread asks, by the one that starts it, cleared by itself when it ends.
        self._asking = threading.Event()
        # Set when the first question had an answer, or none.
        self._heard = threading.Event()

    def has(self, topic: str, partitions: int) -> bool:
        """Tell whether a topic is known to have so many partitions, at least."""
        return self._counts.get(topic, 0) >= partitions

    def missing(self, topic: str, partitions: int, now: float) -> str | None:
        """Say why a topic cannot take a message now, or None where it is there with so many partitions, at least."""
        if self.has(topic, partitions):
            self._missed.pop(topic, None)
            return None
        self.look(now)
        # A list that was asked for before does not count: one may have been under way.
        if self._lists < self._missed.setdefault(topic, self._lists + 1 + self._asking.is_set()):
            return NOT_KNOWN
        lacking = self._hidden.get(topic)
        if lacking is not None:
            return f"is not to be seen: {lacking}"
        return f"does not exist with {partitions} partitions or more; create it"

    def look_now_and_then(self, now: float) -> None:
        """Have the list fetched every few seconds: a topic that was deleted is better found out before it fails."""
        if now - self._asked >= _IDLE_METADATA_INTERVAL_S:
            self.look(now)

    @property
    def were_heard(self) -> bool:
        """Whether the list was fetched once, or could not be."""
        return self._heard.is_set()

    def look(self, now: float) -> None:
        """Have the list fetched, if the last one is not of a moment ago. Does not wait."""
        if self._asking.is_set() or now - self._asked < _METADATA_INTERVAL_S:
            return
        self._asked = now
        self._asking.set()
        threading.Thread(target=self._look, name=f"penstock-coordinator-looks-{self._name}", daemon=True).start()

    def _look(self) -> None:
        try:
            counts = self._ask()
            # A copy of a dict's keys is one step under the interpreter lock. Who is hidden is known before the list
            # counts: what is missing in it is explained by then.
            missed = [topic for topic in list(self._missed) if topic not in counts]
            self._hidden = self._ask_hidden(missed[:_ASKED_FOR]) if missed else {}
            self._lists += 1
            self._counts = counts
        except PenstockError as error:
            _log.warning("%s; what is committed to topics not known yet waits", error)
        finally:
            self._asking.clear()
            self._heard.set()


def cluster_targets(admin: AdminClient, name: str, rights: MissingRights) -> Targets:
    """Return the targets of a cluster; a right that is missing to see one is noted in `rights`."""

    def hidden(missed: Sequence[str]) -> Mapping[str, str]:
        return {
            topic: rights.lacks(topic_right(Operation.WRITE, topic))
            for topic in hidden_topics(admin, missed, _ANSWER_S)
        }

    return Targets(lambda: partition_counts(admin, _ANSWER_S), name, hidden)


#: Seconds between two looks whether a topic may leave quarantine.
_RELEASE_INTERVAL_S = 0.25


class TargetGate:
    """Judges targets for one engine. Used by its thread; times are monotonic seconds.

    `discarded` is the topic of what is discarded.
    """

    def __init__(
        self,
        targets: Targets,
        owned: Mapping[int, Backlog],
        quarantine: TargetQuarantine,
        ration: RationedLog,
        discarded: str,
    ) -> None:
        self.targets = targets
        self._discarded = discarded
        self._owned = owned
        self._ration = ration
        self.quarantine = quarantine
        # Topics that were found to be missing.
        self._absent: set[str] = set()
        self._released = time.monotonic()

    def blocking(self, pending: Pending) -> str | None:
        """Name the topic for whose sake a transaction cannot be published with the others, or return None.

        One whose messages are neither in memory nor at hand is read again, and tried as what its target refused is.
        """
        quarantine, has = self.quarantine, self.targets.has
        # Where nothing is apart that is no question; nearly all go this way.
        asks = bool(quarantine)
        is_discarded = pending.verdict is _DISCARD
        halves = (pending.half,) if is_discarded or pending.parts is None else pending.halves
        for half in halves:
            topic, partition = (self._discarded, None) if is_discarded else (half.topic, half.partition)
            if not has(topic, 1 if partition is None else partition + 1):
                return topic
            if asks and quarantine.is_out(topic):
                return topic
        if pending.dropped is None or pending.is_at_hand:
            return None
        return self._discarded if is_discarded else pending.half.topic

    def blame(self, named: Mapping[str, str], now: float) -> None:
        """Keep topics out of the next common transactions, each for a reason."""
        for topic, why in named.items():
            is_new = not self.quarantine.is_out(topic)
            self.quarantine.suspect(topic, why, now)
            if is_new:
                self.quarantine.watch(topic, now)
            text = "topic %s does not take all that is for it: %s; what is for it is tried apart from the others"
            self._ration.warn(f"target {topic}", text, topic, why)

    def named(self, error: NotPublishedError) -> dict[str, str]:
        """Return the topics that a Kafka transaction failed for, each with the reason.

        The library fails whole batches for one message: who it is shows where each is a batch.
        """
        return {**dict(error.failed.values()), **error.targets}

    def settled(self, names: Iterable[str]) -> None:
        """Take in that transactions are settled."""
        if self.quarantine:
            for name in names:
                self.quarantine.forget(name)

    def refuse_too_large(self, error: NotPublishedError, commit: GroupCommit, now: float) -> None:
        """Take in that the only transaction of a commit does not fit into the client's buffer."""
        for entry in commit.decided():
            for topic in sorted(commit.topics())[:1]:
                self.refuse(entry.transaction_id, topic, str(error), now)
                self.quarantine.suspect(topic, str(error), now)

    def refuse(self, transaction_id: str, topic: str, why: str, now: float) -> None:
        """Take in that a topic refused a transaction."""
        if self.quarantine.refuse(transaction_id, topic, why, now):
            _log.error(
                "transaction %s is committed and refused by %s: %s; it is tried again, and holds later ones of its key "
                "and target; see `penstock tx show`, and discard it by `penstock tx discard` if it cannot be fixed",
                transaction_id,
                topic,
                why,
            )

    def missing(self, topic: str, now: float) -> str | None:
        """Say why nothing need be tried for a topic's sake: it is not there; or return None."""
        fronts = (next(iter(backlog.set_aside.fronts(topic)), None) for backlog in self._owned.values())
        for waiting in filter(None, fronts):
            why = self.targets.missing(topic, waiting.partitions_wanted(topic), now)
            if why is not None:
                if why is not NOT_KNOWN:
                    text = "transaction %s is committed and waits: topic %s %s"
                    self._ration.warn(f"target {topic}", text, waiting.transaction_id, topic, why)
                return why
        return None

    def is_absent(self, topic: str, why: str, now: float) -> None:
        """Take in that a topic is not there."""
        self._absent.add(topic)
        self.quarantine.fail(topic, why, now)

    def release(self, now: float) -> None:
        """Let topics out of quarantine that are well again, and try those at once that have come back."""
        if now - self._released < _RELEASE_INTERVAL_S or not self.quarantine:
            return
        self._released = now
        if self._absent:
            self.targets.look(now)
            for topic in [topic for topic in self._absent if self.targets.has(topic, 1)]:
                self._absent.discard(topic)
                self.quarantine.try_now(topic, now)
        waiting = {topic for backlog in self._owned.values() for topic in backlog.set_aside.topics()}
        for topic in self.quarantine.release(self._has_unrefused, waiting, now):
            for backlog in self._owned.values():
                backlog.release(topic, self.quarantine.is_refused)

    def _has_unrefused(self, topic: str) -> bool:
        """Tell whether something waits for a topic's sake that was not refused."""
        return any(self.candidates(backlog, topic, 1) for backlog in self._owned.values())

    def candidates(self, backlog: Backlog, topic: str, most: int) -> list[Pending]:
        """Return what can be tried for a topic's sake in a partition, and was not refused before."""
        is_refused = self.quarantine.is_refused
        return backlog.set_aside.take(topic, most, lambda waiting: is_refused(waiting.transaction_id))

    def refused_longest(self, topic: str) -> tuple[int, Pending] | None:
        """Return the refused one of a topic that was not tried for longest, with its partition."""
        found = [
            (self.quarantine.tried_at(waiting.transaction_id), number, waiting)
            for number, backlog in self._owned.items()
            for waiting in backlog.set_aside.fronts(topic)
            if not waiting.in_flight and self.quarantine.is_refused(waiting.transaction_id)
        ]
        return min(found, key=lambda candidate: candidate[0])[1:] if found else None
