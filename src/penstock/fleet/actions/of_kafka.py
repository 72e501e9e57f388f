"""Actions on what lies in Kafka, done by the dashboard's own process: offsets, dead letters, transactions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock import clients
from penstock.clients.requests.topics import partition_counts, require_topics
from penstock.clients.rights import principal_of
from penstock.dead_letters.reader import DeadLetterLog
from penstock.dead_letters.replay import Choice, Replay
from penstock.errors import PenstockError
from penstock.fleet.actions.action import Asked, Result, Surroundings
from penstock.fleet.actions.parameters import ParameterError, Parameters
from penstock.fleet.commands.sender import CommandSender
from penstock.fleet_member import Outcome
from penstock.group_offsets.group import Group, GroupState
from penstock.group_offsets.moving import move, planned_reset
from penstock.group_offsets.planning import Change
from penstock.transactions.operator.effects import Effect
from penstock.transactions.stores.kafka.administration import KafkaAdministration
from penstock.transactions.wire.ids import is_id
from penstock.transactions.wire.ops import Verdict

#: Seconds to wait until a decision took effect.
_EFFECT_S = 15.0
#: Partitions that are named in a sentence.
_MOST_NAMED = 5
_DECISIONS = {"commit": Verdict.COMMIT, "rollback": Verdict.ROLLBACK, "discard": Verdict.DISCARD}


@dataclass(frozen=True, slots=True)
class MoveOffsets:
    """Has a group without members begin elsewhere."""

    group: str
    to: str
    topics: Sequence[str] | None
    keep_done: bool

    def plan(self, around: Surroundings) -> Result:
        """Say where it would begin; REFUSED where it has members."""
        state, changes = self._planned(around)
        said = f"group {self.group} would begin elsewhere: {_moves(changes)}"
        if state.members:
            count = len(state.members)
            return Result(
                Outcome.REFUSED,
                f"{said}; but it has {count} member{'' if count == 1 else 's'}, which commit their own: stop what runs",
            )
        return Result(Outcome.DONE, said)

    def run(self, around: Surroundings, asked: Asked, sender: CommandSender) -> Result:  # noqa: ARG002 - an action's
        """Commit the offsets."""
        state, changes = self._planned(around)
        move(self._known(around), state, changes)
        return Result(Outcome.DONE, f"group {self.group} begins elsewhere: {_moves(changes)}")

    def _planned(self, around: Surroundings) -> tuple[GroupState, list[Change]]:
        return planned_reset(self._known(around), self.to, self.topics, keep_done=self.keep_done)

    def _known(self, around: Surroundings) -> Group:
        return Group(around.bootstrap_servers, around.config, self.group)


@dataclass(frozen=True, slots=True)
class ReplayLetter:
    """Sends one dead letter back to the topic that it came from."""

    topic: str
    partition: int
    offset: int

    @property
    def group(self) -> str:
        """The topic: no group is meant."""
        return self.topic

    @property
    def _place(self) -> str:
        return f"{self.topic}[{self.partition}]@{self.offset}"

    def plan(self, around: Surroundings) -> Result:
        """Say where it would go."""
        return Result(Outcome.DONE, f"{self._place} would be sent to {self._replayed(around, dry_run=True)}")

    def run(self, around: Surroundings, asked: Asked, sender: CommandSender) -> Result:  # noqa: ARG002 - an action's
        """Send it."""
        return Result(Outcome.DONE, f"{self._place} was sent to {self._replayed(around, dry_run=False)}")

    def _replayed(self, around: Surroundings, *, dry_run: bool) -> str:
        """Send the letter, unless it is a dry run; return where it went, or would go."""
        admin = clients.admin(around.bootstrap_servers, around.config)
        counts = partition_counts(admin, around.bootstrap_servers)
        if self.topic not in counts:
            who = principal_of(around.config)
            counts |= require_topics(admin, around.bootstrap_servers, [self.topic], principal=who)
        with DeadLetterLog(around.bootstrap_servers, around.config) as log:
            if self.partition >= counts[self.topic] or log.at(self.topic, self.partition, self.offset) is None:
                raise PenstockError(f"there is no message at {self._place}; look at the topic again")
            work = Replay(
                log,
                bootstrap_servers=around.bootstrap_servers,
                config=around.config,
                topic=self.topic,
                partitions=counts,
                choice=Choice(place=(self.partition, self.offset), alone=True),
                limit=1,
                dry_run=dry_run,
            )
            work.run()
        found = work.outcome
        if found.sent:
            return next(iter(found.sent))
        if found.left:
            raise PenstockError(f"{self._place} was not sent: it {next(iter(found.left)).value}")
        raise PenstockError(
            f"{self._place} was not sent: an earlier replay sent it (`penstock dlq replay --again` sends it twice)"
        )


@dataclass(frozen=True, slots=True)
class _OfTransaction:
    """What is done to one transaction of a store in Kafka."""

    prefix: str
    transaction_id: str

    @property
    def group(self) -> str:
        """The store."""
        return self.prefix

    def _store(self, around: Surroundings) -> KafkaAdministration:
        return KafkaAdministration(around.bootstrap_servers, self.prefix, around.config)


@dataclass(frozen=True, slots=True)
class SettleTransaction(_OfTransaction):
    """Decides a pending transaction, as an operator."""

    verdict: Verdict

    def plan(self, around: Surroundings) -> Result:
        """Say what it waits for, and what would be decided; REFUSED where it is not pending."""
        with self._store(around) as store:
            found = store.show(self.transaction_id)
        if found is None:
            return Result(Outcome.REFUSED, f"transaction {self.transaction_id} is not pending in {self.prefix}")
        waits = found.waits_for or "a decision"
        return Result(
            Outcome.DONE,
            f"{self.verdict.name} would be stored for transaction {self.transaction_id} of {found.group} in "
            f"{self.prefix}, pending for {found.age_s:.0f} s, which waits for {waits}",
        )

    def run(self, around: Surroundings, asked: Asked, sender: CommandSender) -> Result:  # noqa: ARG002 - an action's
        """Decide it. The store has an audit of its own, where it stands, too."""
        with self._store(around) as store:
            decided = store.decide(self.transaction_id, self.verdict, asked.by, asked.id, _EFFECT_S)
        outcome = {Effect.DONE: Outcome.DONE, Effect.REFUSED: Outcome.REFUSED, Effect.WAITS: Outcome.SENT}
        return Result(outcome[decided.effect], f"transaction {self.transaction_id}: {decided.text(self.verdict)}")


@dataclass(frozen=True, slots=True)
class ResumeTransaction(_OfTransaction):
    """Brings a discarded transaction back, undecided."""

    def plan(self, around: Surroundings) -> Result:
        """Say what would be brought back; REFUSED where it is not among the discarded."""
        with self._store(around) as store:
            found = [
                discarded for discarded in store.discarded() if discarded.half.transaction_id == self.transaction_id
            ]
        if not found:
            return Result(Outcome.REFUSED, f"transaction {self.transaction_id} is not among the discarded")
        return Result(
            Outcome.DONE,
            f"{_counted(len(found), 'message')} of transaction {self.transaction_id} would be brought back to "
            f"{self.prefix}, undecided; its group is asked again",
        )

    def run(self, around: Surroundings, asked: Asked, sender: CommandSender) -> Result:  # noqa: ARG002 - an action's
        """Bring it back."""
        with self._store(around) as store:
            count = store.resume(self.transaction_id, asked.by, asked.id)
        said = f"transaction {self.transaction_id}: {_counted(count, 'message')} brought back; its group is asked again"
        return Result(Outcome.DONE, said)


def offsets(given: Parameters) -> MoveOffsets:
    """Return the action that moves a group's offsets."""
    return MoveOffsets(given.text("group"), given.text("to"), given.texts("topics"), given.flag("keep_done"))


def replay(given: Parameters) -> ReplayLetter:
    """Return the action that replays a dead letter."""
    return ReplayLetter(given.text("topic"), given.number("partition"), given.number("offset"))


def settle(given: Parameters) -> SettleTransaction:
    """Return the action that decides a transaction."""
    verdict = _DECISIONS[given.choice("decision", tuple(_DECISIONS))]
    return SettleTransaction(given.text("prefix"), transaction_id(given), verdict)


def resume_transaction(given: Parameters) -> ResumeTransaction:
    """Return the action that brings a transaction back."""
    return ResumeTransaction(given.text("prefix"), transaction_id(given))


def transaction_id(given: Parameters) -> str:
    """Return the id of a transaction that must be there."""
    found = given.text("transaction_id")
    if not is_id(found):
        raise ParameterError("transaction_id must be the id of a transaction, as `penstock tx ls` names them")
    return found


def _moves(changes: Sequence[Change]) -> str:
    """Say which offsets become which, and what that means."""
    again, skipped = sum(change.again for change in changes), sum(change.skipped for change in changes)
    named = [f"{change.before.place} from {_offset(change.before.committed)} to {change.offset}" for change in changes]
    more = f" and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
    places = ", ".join(named[:_MOST_NAMED]) + more or "no partition"
    return f"{places}; {_counted(again, 'message')} handled again, {_counted(skipped, 'message')} skipped"


def _offset(committed: int | None) -> str:
    return "nothing" if committed is None else str(committed)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
