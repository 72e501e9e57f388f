"""`CommandListener`: a thread in a member that carries out what is asked of it, and answers in the audit.

It joins no group and begins at the end of the topic, so a member that starts does nothing that was asked of its
predecessor. After a failure it begins where it stood: what was asked meanwhile is done, if it still holds.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from confluent_kafka import TIMESTAMP_LOG_APPEND_TIME

from penstock.clients.ration import once_in, rationed
from penstock.clients.reading import Place
from penstock.errors import MessageFormatError, PenstockError
from penstock.fleet.commands.audit import Answer, AuditRecord, AuditWriter, Kind, prepare_topics
from penstock.fleet.commands.carrying_out import carry_out
from penstock.fleet.commands.command import Command, decode_command
from penstock.fleet.topics import TopicFollower, TopicService, signed_value
from penstock.fleet.wire import one_line
from penstock.fleet_member import CommandSettings, Member, Outcome, StoreOperator
from penstock.options import ClientConfig

if TYPE_CHECKING:
    from confluent_kafka import Message

_log = rationed(__name__)

#: Seconds for which a command holds, by the broker's clock and this machine's.
HOLDS_S = 60.0
#: Seconds that a signed command may lie between the clock of who asked and the broker's: a copy of it is older.
MOST_SKEW_S = 300.0
#: Seconds between two log lines about records that are no commands.
_LOG_INTERVAL_S = 60.0
_POLL_S = 0.2
#: Ids of commands that are remembered: more than come in the time in which one could be repeated.
_REMEMBERED = 10_000


class CommandListener(TopicService):
    """Listens until it is stopped. `start` and `stop` are for one thread.

    Args:
        group: name of the app, or of the coordinators of a store.
        member: name under which this process reports.
        doing: what it can do: a member's handlers, or a coordinator to its store.
        bootstrap_servers: addresses of the brokers.
        config: client settings by librdkafka's names.
        settings: the options.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        group: str,
        member: str,
        doing: Member | StoreOperator,
        *,
        bootstrap_servers: str,
        config: ClientConfig,
        settings: CommandSettings,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(f"penstock-commands-{group}", f"{group} hears no commands in {settings.topic}")
        self._group = group
        self._member = member
        self._doing = doing
        self._servers = bootstrap_servers
        self._config = config
        self._settings = settings
        self._clock = clock
        # All below: the listener's thread's alone.
        self._positions: Mapping[Place, int] = {}
        self._seen: OrderedDict[str, None] = OrderedDict()
        #: Records that were no commands that count: garbage, forged, expired, repeated. Reading one number is safe.
        self.passed_over = 0

    def _work(self) -> None:
        prepare_topics(self._servers, self._config, self._settings, read=True)
        follower = TopicFollower(self._servers, self._config, self._settings.topic, self._positions)
        self._positions = follower.positions
        try:
            writer = AuditWriter(self._servers, self._config, self._settings)
            _log.info("%s hears commands in %s", self._group, self._settings.topic)
            self._works()
            while not self._stopping.is_set():
                for message in follower.poll(_POLL_S):
                    self._take(message, writer)
                if follower.trouble is None:
                    self._works()
                else:
                    self._failed(follower.trouble)
        finally:
            follower.close()

    def _take(self, message: Message, writer: AuditWriter) -> None:
        if message.key() != self._group.encode(errors="replace"):
            return  # for others, or nothing
        try:
            command = self._checked(message)
        except MessageFormatError as error:
            self.passed_over += 1
            _log.warning("in %s: %s", self._settings.topic, error, extra=once_in(_LOG_INTERVAL_S, self._group))
            return
        if command is None:
            return
        late = self._too_late(message, command)
        answer = carry_out(command, self._doing) if late is None else Answer(Outcome.REFUSED, late)
        _log.warning("%s, asked by %s: %s", command.name, one_line(command.by), one_line(answer.said))
        try:
            writer.tell(AuditRecord.of(Kind.ANSWER, command, self._member, answer), self._group)
        except PenstockError as error:
            _log.warning("what became of %s (%s) is not in the audit: %s", command.name, command.id, error)

    def _checked(self, message: Message) -> Command | None:
        """Return a command for this member; None for one that is another's, or was done."""
        command = decode_command(signed_value(message, self._settings.token))
        if command.group != self._group or command.member not in {None, self._member}:
            return None
        if command.id in self._seen:
            raise MessageFormatError("a command that was heard before; it is passed over")
        self._seen[command.id] = None
        if len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)
        return command

    def _too_late(self, message: Message, command: Command) -> str | None:
        """Return why a command does not hold any more, or None where it does."""
        kind, stamped_ms = message.timestamp()
        if kind != TIMESTAMP_LOG_APPEND_TIME:
            return (
                f"{self._settings.topic} is not stamped by the brokers, so nobody knows when this was asked; set "
                "message.timestamp.type=LogAppendTime on it"
            )
        if self._settings.token is not None and abs(stamped_ms - command.asked_ms) > MOST_SKEW_S * 1000:
            return (
                f"it was asked {abs(stamped_ms - command.asked_ms) / 1000:.0f} s apart from when the broker had it: it "
                "is a copy, or the clock of who asked is wrong"
            )
        age_s = self._clock() - stamped_ms / 1000
        if age_s > HOLDS_S:
            return (
                f"it was heard {age_s:.0f} s after the broker had it, by this machine's clock, and holds for "
                f"{HOLDS_S:g} s; ask again, and see to the clocks where they differ"
            )
        return None
