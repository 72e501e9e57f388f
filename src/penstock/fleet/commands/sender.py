"""`CommandSender`: sends commands to members, and collects their answers from the audit."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import TYPE_CHECKING

from penstock.errors import MessageFormatError
from penstock.fleet.commands.audit import AuditRecord, AuditWriter, Kind, decode_audit, prepare_topics
from penstock.fleet.commands.command import ACTIONS, Command, Executor, encode_command
from penstock.fleet.topics import TopicFollower, signed_value
from penstock.fleet_member import CommandSettings, Outcome
from penstock.options import ClientConfig

if TYPE_CHECKING:
    from confluent_kafka import Message

#: The answer timeout in seconds: giving a message up can take ten.
ANSWER_S = 12.0
#: Seconds to wait for further answers after the first, if the members are unknown.
_OTHER_ANSWERS_S = 1.5
_POLL_S = 0.1


class CommandSender(AuditWriter):
    """Sends commands, reads their answers and writes to the audit. For one thread.

    Args:
        settings: the topics, and the token for signatures.

    Raises:
        PenstockError: all methods raise the errors of `prepare_topics`, `RecordWriter` and `TopicFollower`.
    """

    def __init__(self, bootstrap_servers: str, config: ClientConfig, settings: CommandSettings) -> None:
        settings = settings.with_token()
        prepare_topics(bootstrap_servers, config, settings, read=False)
        super().__init__(bootstrap_servers, config, settings)
        self._config = config
        self._settings = settings

    def ask(self, command: Command, members: Collection[str] = (), timeout: float = ANSWER_S) -> list[AuditRecord]:
        """Send a command and return the answers that arrived in time, the first of each member.

        Args:
            command: the command.
            members: the members expected to answer, if they are known: it returns when all have answered.
            timeout: seconds.
        """
        expected = {command.member} if command.member is not None else set(members)
        is_for_holder = ACTIONS[command.name].executor is Executor.HOLDER and command.member is None
        answers: dict[str, AuditRecord] = {}
        # It starts before the command is sent, so it misses no answer.
        follower = TopicFollower(self._servers, self._config, self._settings.audit_topic)
        try:
            self.write(self._settings.topic, encode_command(command), command.key)
            deadline = time.monotonic() + timeout
            while time.monotonic() < deadline and not (expected and expected <= answers.keys()):
                for message in follower.poll(_POLL_S):
                    record = self._answer_to(command, message)
                    if record is None or record.by in answers:
                        continue
                    answers[record.by] = record
                    if is_for_holder and record.outcome is Outcome.DONE:
                        return list(answers.values())
                    # Refusals arrive before the answer of the holder, so the first answer is no sign of the last.
                    if not expected and not is_for_holder:
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
    """Return the outcome of a command by the answers to it, and one sentence about it."""
    whom = f"{command.member} of {command.group}" if command.member else f"members of {command.group}"
    what = f"{command.name} {command.place}".strip()
    executor = ACTIONS[command.name].executor
    program = "penstock coordinator" if executor is Executor.STORE else "penstock run"
    if not answers:
        return Outcome.SENT, (
            f"{what}: sent to {whom}, and none answered in time; check that it runs with `{program} --commands` and "
            "has the same token"
        )
    missing = set(members) - {answer.by for answer in answers}
    outcomes = {answer.outcome for answer in answers}
    order = (Outcome.FAILED, Outcome.REFUSED, Outcome.SENT)
    worst = next((outcome for outcome in order if outcome in outcomes), Outcome.DONE)
    if executor is Executor.HOLDER and Outcome.DONE in outcomes:
        # The other members do not hold the message.
        worst, missing = Outcome.DONE, set()
        answers = [answer for answer in answers if answer.outcome is Outcome.DONE]
    said = "; ".join(f"{answer.by}: {answer.said}" for answer in answers)
    if missing:
        said += f"; no answer in time from {', '.join(sorted(missing))}"
        worst = Outcome.SENT if worst is Outcome.DONE else worst
    return worst, f"{what}: {said}"
