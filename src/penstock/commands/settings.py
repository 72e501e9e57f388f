"""What an app says about commands: the topics that they and the audit are in, and the token that signs them."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace

from penstock import options as check
from penstock.clients.requests.topics import TopicSpec
from penstock.commands import audit, command
from penstock.errors import ConfigurationError

#: Holds the token that commands are signed with.
TOKEN_VARIABLE = "PENSTOCK_COMMANDS_TOKEN"  # noqa: S105 - the name of a variable
#: Characters of a token at least.
LEAST_TOKEN = 16

_DAY_MS = 24 * 3600 * 1000


@dataclass(frozen=True, slots=True)
class CommandSettings:
    """How a member is commanded, where `App(commands=True)` is not enough.

    Args:
        topic: name of the topic of commands; created when absent. Whoever may write it commands the members.
        audit_topic: name of the topic in which stands what was done; created when absent.
        token: with it, commands that were not signed with it are ignored; taken from `PENSTOCK_COMMANDS_TOKEN` where it
            is left out.

    Raises:
        ConfigurationError: an option is wrong.
    """

    topic: str = "penstock.commands"
    audit_topic: str = "penstock.audit"
    token: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check.not_empty("topic", self.topic)
        check.not_empty("audit_topic", self.audit_topic)
        if self.topic == self.audit_topic:
            raise ConfigurationError(f"topic and audit_topic are both {self.topic}; name two topics")
        if self.token is not None and len(self.token) < LEAST_TOKEN:
            raise ConfigurationError(
                f"token must have {LEAST_TOKEN} characters at least; make one with `openssl rand -hex 32`"
            )

    def with_token(self) -> CommandSettings:
        """Return the same with the token of the environment where it has none; `ConfigurationError` as above."""
        token = self.token or os.environ.get(TOKEN_VARIABLE) or None
        return self if token == self.token else replace(self, token=token)


def command_settings(given: bool | CommandSettings) -> CommandSettings | None:
    """Return the settings that a user gave as `commands`, or None; `ConfigurationError` where it is neither."""
    return check.switched("commands", given, CommandSettings)


def commands_spec(name: str) -> TopicSpec:
    """Return the topic of commands as it is created: they hold for a minute, so an hour is enough."""
    return TopicSpec(
        name,
        1,
        {
            "cleanup.policy": "delete",
            "retention.ms": str(3600 * 1000),
            "segment.ms": str(3600 * 1000),
            "max.message.bytes": str(4 * command.MOST_BYTES),
            "message.timestamp.type": "LogAppendTime",
        },
    )


def audit_spec(name: str) -> TopicSpec:
    """Return the topic of the audit as it is created: kept for a year, stamped by the broker."""
    return TopicSpec(
        name,
        1,
        {
            "cleanup.policy": "delete",
            "retention.ms": str(365 * _DAY_MS),
            "max.message.bytes": str(2 * audit.MOST_BYTES),
            "message.timestamp.type": "LogAppendTime",
        },
    )
