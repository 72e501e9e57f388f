"""The interface of a process to `penstock.fleet`: its name, its settings for reports and commands, its operations.

`App` and the coordinators import only this file. `penstock.fleet` is a layer above them. It is imported by name if
`report=` or `commands=` is on, and not loaded otherwise.
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

#: Not `penstock.status`, which is a topic of the transaction store with the prefix `penstock`, kept for an hour.
REPORTS_TOPIC = "penstock.reports"
#: The longest interval of reports, in seconds: with a longer one, a silent member would be noticed too late.
MOST_INTERVAL_S = 60.0
#: The environment variable with the token that signs commands.
TOKEN_VARIABLE = "PENSTOCK_COMMANDS_TOKEN"  # noqa: S105 - the name of a variable
#: Least characters of a token.
LEAST_TOKEN = 16
#: Most characters of a name in a report.
_MOST_NAME = 250


@dataclass(frozen=True, slots=True)
class ReportSettings:
    """Settings of a member's reports, for `App(report=...)`.

    Args:
        topic: name of the topic; created if absent. Apps that are shown together share it.
        interval: seconds between two reports. It grows if making a report takes more than 0.5 % of it.

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
    """Settings of a member's commands, for `App(commands=...)`.

    Args:
        topic: name of the topic of commands; created if absent. Anyone with write permission on it can command members.
        audit_topic: name of the topic of the audit log; created if absent.
        token: if set, commands without its signature are ignored; default: `PENSTOCK_COMMANDS_TOKEN`.

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
        """Return these settings with the environment's token if they have none; `ConfigurationError` as above."""
        token = self.token or os.environ.get(TOKEN_VARIABLE) or None
        return self if token == self.token else replace(self, token=token)


def report_settings(given: bool | ReportSettings) -> ReportSettings | None:
    """Return the settings for the option `report`, or None if it is off; `ConfigurationError` if it is invalid."""
    return check.switched("report", given, ReportSettings)


def command_settings(given: bool | CommandSettings) -> CommandSettings | None:
    """Return the settings for the option `commands`, or None if it is off; `ConfigurationError` if it is invalid."""
    return check.switched("commands", given, CommandSettings)


@dataclass(frozen=True, slots=True)
class Sender:
    """The identity of a process in reports and commands."""

    group: str
    member: str
    host: str
    process: int

    @property
    def key(self) -> bytes:
        """The key of its reports."""
        return json.dumps([self.group, self.member]).encode()


def sender_of(group: str, config: ClientConfig) -> Sender:
    """Return the identity of this process: stable over restarts with a `group.instance.id`, otherwise new."""
    host = socket.gethostname()
    member = instance_id(config) or f"{host}-{os.getpid()}-{secrets.token_hex(2)}"
    return Sender(group[:_MOST_NAME], member[:_MOST_NAME], host[:_MOST_NAME], os.getpid())


class Outcome(Enum):
    """The outcome of an action."""

    DONE = "done"
    #: Sent to members, without an answer in time.
    SENT = "sent"
    #: Not possible; nothing was done.
    REFUSED = "refused"
    #: It broke off, or its effect is unknown.
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Member:
    """The operations of a member, callable from any thread; see `RunningApp`.

    Attributes:
        stacks: returns by name the stacks of running handlers, each as text of `traceback`.
    """

    pause: Callable[[str, int | None], None]
    resume: Callable[[str, int | None], None]
    give_up: Callable[[str, int, int], str]
    stacks: Callable[[], Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class StoreOperator:
    """The operations of a coordinator on the transactions of its store. Called on the listener's thread.

    Attributes:
        settle: decides a pending transaction. Takes its id, the decision, the requester and the command's id for the
            audit; returns the outcome and a sentence about it.
        resume: brings a discarded transaction back. Takes its id, the requester and the command's id; returns a
            sentence.
    """

    settle: Callable[[str, str, str, str], tuple[Outcome, str]]
    resume: Callable[[str, str, str], str]


#: Returns the description of the process.
Describe = Callable[[], Mapping[str, Any]]


class Service(Protocol):
    """A service of `penstock.fleet` with a thread of its own. Call `start` and `stop` from one thread."""

    def start(self) -> None:
        """Start the thread; returns at once."""

    def stop(self) -> None:
        """Stop the thread, within seconds."""


@dataclass(frozen=True, slots=True)
class FleetMember:
    """The part of a process that `penstock.fleet` needs.

    Attributes:
        sender: its identity in reports and commands.
        bootstrap_servers: addresses of the brokers.
        config: client settings by librdkafka's names.
        report: settings of its reports; None: it does not report.
        commands: settings of its commands; None: it accepts none.
    """

    sender: Sender
    bootstrap_servers: str
    config: ClientConfig = field(repr=False)
    report: ReportSettings | None = None
    commands: CommandSettings | None = None

    def reporter(self, describe: Describe) -> Service | None:
        """Return the reporter of this process, not started; None if it does not report."""
        if self.report is None:
            return None
        reporter = _of_fleet("reports.reporter", "Reporter", "report")
        made: Service = reporter(self.sender, describe, self.bootstrap_servers, self.config, self.report)
        return made

    def listener(self, target: Member | StoreOperator) -> Service | None:
        """Return the listener that executes commands, not started; None if the process accepts none."""
        if self.commands is None:
            return None
        listener = _of_fleet("commands.listener", "CommandListener", "commands")
        made: Service = listener(
            self.sender.group,
            self.sender.member,
            target,
            bootstrap_servers=self.bootstrap_servers,
            config=self.config,
            settings=self.commands.with_token(),
        )
        return made


def _of_fleet(module: str, name: str, option: str) -> Callable[..., Any]:
    # Imported by name: an import statement would make the engines depend on a tool.
    try:
        found: Callable[..., Any] = getattr(import_module(f"penstock.fleet.{module}"), name)
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"{option} needs the package penstock.fleet, which this installation lacks ({error}); install all of "
            f"penstock, or omit {option}"
        ) from error
    return found
