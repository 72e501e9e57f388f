"""`CommandSender`: tells members what to do, and hears what came of it in the audit."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import TYPE_CHECKING

from penstock.errors import MessageFormatError
from penstock.fleet.commands.audit import AuditRecord, AuditWriter, Kind, decode_audit, prepare_topics
from penstock.fleet.commands.command import ACTIONS, Command, Doer, encode_command
from penstock.fleet.topics import TopicFollower, signed_value
from penstock.fleet_member import CommandSettings, Outcome
from penstock.options import ClientConfig

if TYPE_CHECKING:
    from confluent_kafka import Message

#: Seconds that members have for an answer: giving a message up may take ten.
ANSWER_S = 12.0
#: Seconds after the first answer, where it is not known who else there is.
_OTHER_ANSWERS_S = 1.5
_POLL_S = 0.1


class CommandSender(AuditWriter):
    """Sends commands and follows their answers, and writes to the audit. For one thread. Raises as its parts.

    Args:
        bootstrap_servers: addresses of the brokers.
        config: client settings by librdkafka's names.
        settings: the topics, and the token to sign with.
    """

    def __init__(self, bootstrap_servers: str, config: ClientConfig, settings: CommandSettings) -> None:
        settings = settings.with_token()
        prepare_topics(bootstrap_servers, config, settings, read=False)
        super().__init__(bootstrap_servers, config, settings)
        self._config = config
        self._settings = settings

    def ask(self, command: Command, members: Collection[str] = (), timeout: float = ANSWER_S) -> list[AuditRecord]:
        """Send a command and return the answers that came in time, the first of each member.

        Args:
            command: what to do.
            members: who is to answer, where that is known: it returns when all have.
            timeout: seconds.
        """
        wanted = {command.member} if command.member is not None else set(members)
        is_for_holder = ACTIONS[command.name].doer is Doer.HOLDER and command.member is None
        answers: dict[str, AuditRecord] = {}
        # Before the command: no answer comes earlier.
        follower = TopicFollower(self._servers, self._config, self._settings.audit_topic)
        try:
            self.write(self._settings.topic, encode_command(command), command.key)
            deadline = time.monotonic() + timeout
            while time.monotonic() < deadline and not (wanted and wanted <= answers.keys()):
                for message in follower.poll(_POLL_S):
                    record = self._answer_to(command, message)
                    if record is None or record.by in answers:
                        continue
                    answers[record.by] = record
                    if is_for_holder and record.outcome is Outcome.DONE:
                        return list(answers.values())
                    # Of those who may hold it, refusals come first: the one that does it takes its time.
                    if not wanted and not is_for_holder:
                        deadline = min(deadline, time.monotonic() + _OTHER_ANSWERS_S)
        finally:
            follower.close()
        return list(answers.values())

    def _answer_to(self, command: Command, message: Message) -> AuditRecord | None:
        try:
            record = decode_audit(signed_value(message, self._settings.token))
        except MessageFormatError:
            return None
        is_answer = record.kind is Kind.ANSWER and record.id == command.id and record.outcome is not None
        return record if is_answer else None


def summary(command: Command, answers: Collection[AuditRecord], members: Collection[str] = ()) -> tuple[Outcome, str]:
    """Return what came of a command, and the sentence that says so."""
    whom = f"{command.member} of {command.group}" if command.member else f"members of {command.group}"
    what = f"{command.name} {command.place}".strip()
    doer = ACTIONS[command.name].doer
    listens = "penstock coordinator" if doer is Doer.STORE else "penstock run"
    if not answers:
        return Outcome.SENT, (
            f"{what}: sent to {whom}, and none answered in time; does it listen (`{listens} --commands`), and with "
            "the same token?"
        )
    missing = set(members) - {answer.by for answer in answers}
    outcomes = {answer.outcome for answer in answers}
    order = (Outcome.FAILED, Outcome.REFUSED, Outcome.SENT)
    worst = next((outcome for outcome in order if outcome in outcomes), Outcome.DONE)
    if doer is Doer.HOLDER and Outcome.DONE in outcomes:
        # The others do not have it.
        worst, missing = Outcome.DONE, set()
        answers = [answer for answer in answers if answer.outcome is Outcome.DONE]
    said = "; ".join(f"{answer.by}: {answer.said}" for answer in answers)
    if missing:
        said += f"; no answer in time from {', '.join(sorted(missing))}"
        worst = Outcome.SENT if worst is Outcome.DONE else worst
    return worst, f"{what}: {said}"
