"""What a process gives to `penstock.fleet`: its name, how it reports and hears commands, and what may be done to it.

`App` and the coordinators know this file only. `penstock.fleet` stands above them: it is asked for by name, where
`report=` or `commands=` is on, and nothing of it is loaded otherwise.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from importlib import import_module
from typing import Any, Protocol

from penstock import options as check
from penstock.errors import ConfigurationError
from penstock.option_list import refusing_removed
from penstock.options import ClientConfig, instance_id

#: Not `penstock.status`: that is the topic of a transaction store with the prefix `penstock`, kept for an hour.
REPORTS_TOPIC = "penstock.reports"
#: Seconds between two reports that a reader believes at most: who claims more would be heard of too late.
MOST_INTERVAL_S = 60.0
#: Holds the token that commands are signed with.
TOKEN_VARIABLE = "PENSTOCK_COMMANDS_TOKEN"  # noqa: S105 - the name of a variable
#: Characters of a token at least.
LEAST_TOKEN = 16
#: Characters of a name in a report.
_MOST_NAME = 250


@dataclass(frozen=True, slots=True)
class ReportSettings:
    """How a member reports, where `App(report=True)` is not enough.

    Args:
        topic: name of the topic; created when absent. All whose state is to be seen together share it.
        interval: seconds between two reports; they come less often where making one takes over 0.5 % of that.

    Raises:
        ConfigurationError: an option is wrong.
    """

    topic: str = REPORTS_TOPIC
    interval: float = 2.0

    def __post_init__(self) -> None:
        check.not_empty("topic", self.topic)
        check.positive("interval", self.interval)
        if self.interval > MOST_INTERVAL_S:
            raise ConfigurationError(f"interval must be {MOST_INTERVAL_S:g} s at most, but is {self.interval:g}")


ReportSettings.__init__ = refusing_removed(ReportSettings.__init__)  # type: ignore[assignment] # a dataclass makes it


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


def report_settings(given: bool | ReportSettings) -> ReportSettings | None:
    """Return the settings that a user gave as `report`, or None for none; `ConfigurationError` where it is neither."""
    return check.switched("report", given, ReportSettings)


def command_settings(given: bool | CommandSettings) -> CommandSettings | None:
    """Return the settings that a user gave as `commands`, or None; `ConfigurationError` where it is neither."""
    return check.switched("commands", given, CommandSettings)


@dataclass(frozen=True, slots=True)
class Sender:
    """As whom a process reports and hears commands."""

    group: str
    member: str
    host: str
    process: int

    @property
    def key(self) -> bytes:
        """The key of its reports."""
        return json.dumps([self.group, self.member]).encode()


def sender_of(group: str, config: ClientConfig) -> Sender:
    """Return as whom this process reports: by its `group.instance.id` the same after a restart, else a new one."""
    host = socket.gethostname()
    member = instance_id(config) or f"{host}-{os.getpid()}-{secrets.token_hex(2)}"
    return Sender(group[:_MOST_NAME], member[:_MOST_NAME], host[:_MOST_NAME], os.getpid())


class Outcome(Enum):
    """What came of an action."""

    DONE = "done"
    #: Sent to members, and no answer came in time.
    SENT = "sent"
    #: It could not be, and nothing was done.
    REFUSED = "refused"
    #: What was done is not known, or it broke off.
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Member:
    """What a member can do. All of it may be called from any thread; `RunningApp` says how each behaves.

    Attributes:
        stacks: returns, by name, the stacks of handlers that are no threads of their own, each as `traceback` has it.
    """

    pause: Callable[[str, int | None], None]
    resume: Callable[[str, int | None], None]
    give_up: Callable[[str, int, int], str]
    stacks: Callable[[], Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class StoreOperator:
    """What a coordinator can do to the transactions of its store. Called on the listener's thread.

    Attributes:
        settle: decides a pending one, given its id, the decision, who asked and the command's id, for the audit;
            returns whether that took effect, and the sentence that says so.
        resume: brings a discarded one back, given its id, who asked and the command's id; returns the sentence.
    """

    settle: Callable[[str, str, str, str], tuple[Outcome, str]]
    resume: Callable[[str, str, str], str]


#: Returns the description of the process.
Describe = Callable[[], Mapping[str, Any]]


class Service(Protocol):
    """What `penstock.fleet` runs in a process, on a thread of its own. `start` and `stop` are for one thread."""

    def start(self) -> None:
        """Begin; returns at once."""

    def stop(self) -> None:
        """End, within seconds."""


@dataclass(frozen=True, slots=True)
class FleetMember:
    """A process as `penstock.fleet` needs it.

    Attributes:
        sender: as whom it reports, and the group and the member that commands for it name.
        bootstrap_servers: addresses of the brokers.
        config: client settings by librdkafka's names.
        report: how it reports; None where it does not.
        commands: how it is commanded; None where it is not.
    """

    sender: Sender
    bootstrap_servers: str
    config: ClientConfig = field(repr=False)
    report: ReportSettings | None = None
    commands: CommandSettings | None = None

    def reporter(self, describe: Describe) -> Service | None:
        """Return what reports this process, not started; None where it does not report."""
        if self.report is None:
            return None
        reporter = _of_fleet("reports.reporter", "Reporter", "report")
        made: Service = reporter(self.sender, describe, self.bootstrap_servers, self.config, self.report)
        return made

    def listener(self, doing: Member | StoreOperator) -> Service | None:
        """Return what carries out commands, not started; None where it hears none."""
        if self.commands is None:
            return None
        listener = _of_fleet("commands.listener", "CommandListener", "commands")
        made: Service = listener(
            self.sender.group,
            self.sender.member,
            doing,
            bootstrap_servers=self.bootstrap_servers,
            config=self.config,
            settings=self.commands.with_token(),
        )
        return made


def _of_fleet(module: str, name: str, option: str) -> Callable[..., Any]:
    # By its name: an import would make the engines depend on a tool.
    try:
        found: Callable[..., Any] = getattr(import_module(f"penstock.fleet.{module}"), name)
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"{option} needs the package penstock.fleet, which this installation lacks ({error}); install all of "
            f"penstock, or leave {option} out"
        ) from error
    return found
