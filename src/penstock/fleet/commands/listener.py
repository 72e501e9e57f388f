"""`CommandListener`: a thread in a member that executes commands and answers in the audit.

It joins no group and starts at the end of the topic, so a new member executes no command that was sent to its
predecessor. After a failure it goes on from its last position: commands sent meanwhile are executed if still valid.
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
from penstock.fleet.commands.command import Command, decode_command
from penstock.fleet.commands.execution import execute
from penstock.fleet.topics import TopicFollower, TopicService, signed_value
from penstock.fleet_member import CommandSettings, Member, Outcome, StoreOperator
from penstock.options import ClientConfig
from penstock.places import printable

if TYPE_CHECKING:
    from confluent_kafka import Message

_log = rationed(__name__)

#: Seconds for which a command is valid: the broker's timestamp compared with this machine's clock.
HOLDS_S = 60.0
#: The largest difference in seconds between the sender's time in a signed command and the broker's. A copy is older.
MOST_SKEW_S = 300.0
#: Seconds between two log lines about records that are not commands.
_LOG_INTERVAL_S = 60.0
_POLL_S = 0.2
#: The number of command ids remembered: more than arrive in the time in which a copy is still valid.
_REMEMBERED = 10_000


class CommandListener(TopicService):
    """Listens until it is stopped. Call `start` and `stop` from one thread.

    Args:
        group: name of the app, or of the coordinators of a store.
        member: name of this process in reports.
        target: the handlers of a member, or the store of a coordinator.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        group: str,
        member: str,
        target: Member | StoreOperator,
        *,
        bootstrap_servers: str,
        config: ClientConfig,
        settings: CommandSettings,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(f"penstock-commands-{group}", f"{group} hears no commands in {settings.topic}")
        self._group = group
        self._member = member
        self._target = target
        self._servers = bootstrap_servers
        self._config = config
        self._settings = settings
        self._clock = clock
        # Only the listener's thread uses the fields below.
        self._positions: Mapping[Place, int] = {}
        self._seen: OrderedDict[str, None] = OrderedDict()
        #: The number of ignored records: garbage, forged or repeated. Any thread may read it.
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
            return  # of another group
        try:
            command = self._checked(message)
        except MessageFormatError as error:
            self.passed_over += 1
            _log.warning("in %s: %s", self._settings.topic, error, extra=once_in(_LOG_INTERVAL_S, self._group))
            return
        if command is None:
            return
        invalid = self._why_invalid(message, command)
        answer = execute(command, self._target) if invalid is None else Answer(Outcome.REFUSED, invalid)
        _log.warning("%s, asked by %s: %s", command.name, printable(command.by), printable(answer.said))
        try:
            writer.append(AuditRecord.of(Kind.ANSWER, command, self._member, answer), command.key)
        except PenstockError as error:
            _log.warning("the result of %s (%s) is not in the audit: %s", command.name, command.id, error)

    def _checked(self, message: Message) -> Command | None:
        """Return the command if it is for this member, else None; `MessageFormatError` if it is to be ignored."""
        command = decode_command(signed_value(message, self._settings.token))
        if command.group != self._group or command.member not in {None, self._member}:
            return None
        if command.id in self._seen:
            raise MessageFormatError("a command that was received before; it is ignored")
        self._seen[command.id] = None
        if len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)
        return command

    def _why_invalid(self, message: Message, command: Command) -> str | None:
        """Return the reason why a command is no longer valid, or None if it is valid."""
        kind, stamped_ms = message.timestamp()
        if kind != TIMESTAMP_LOG_APPEND_TIME:
            return (
                f"brokers do not stamp {self._settings.topic}, so the age of this command is unknown; set "
                "message.timestamp.type=LogAppendTime on the topic"
            )
        if self._settings.token is not None and abs(stamped_ms - command.asked_ms) > MOST_SKEW_S * 1000:
            return (
                f"the sender's time and the broker's differ by {abs(stamped_ms - command.asked_ms) / 1000:.0f} s: the "
                "command is a copy, or the sender's clock is wrong"
            )
        age_s = self._clock() - stamped_ms / 1000
        if age_s > HOLDS_S:
            return (
                f"it arrived {age_s:.0f} s after the broker had it, by this machine's clock, and is valid for "
                f"{HOLDS_S:g} s; send it again, and correct the clocks if they differ"
            )
        return None
