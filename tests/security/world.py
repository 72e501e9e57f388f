"""Where a role runs, and how: with all that it needs, or without (`trial`)."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar
from unittest import mock

from confluent_kafka import Producer

from canary import MESSAGE
from commands import Command
from kafka_tools import read_all
from penstock.devbroker import DevBroker, User

T = TypeVar("T")

#: Seconds for one step of a main path, on a busy machine.
STEP_S = 120.0

#: Bytes of a message that the topic takes at most.
LARGEST = 10_000


class FailedCommandError(Exception):
    """A command ended with an error, which is this one's text."""


class Undisturbed:
    """How a role runs that has all its rights: each act succeeds at once."""

    def attempt(self, act: Callable[[], T]) -> T:
        """Run the role's own action, which may be refused."""
        return act()

    def rounds(self, work: Callable[[], object]) -> None:
        """Run the role's main action, which a running part can repeat."""
        work()

    def hear(self, text: str) -> None:
        """Take the output of the part."""


@dataclass(frozen=True)
class World:
    """A role's broker, its settings, its names on the broker, and its folder.

    Attributes:
        broker: the secured broker.
        user: the role's user.
        names: what each placeholder of the table stands for here.
        folder: for databases and stores in files.
        command: runs `penstock ARGUMENTS...`.
        trial: how the role is run.
        sent: values of what was sent to the topic, and has to arrive.
    """

    broker: DevBroker
    user: User
    names: Mapping[str, str]
    folder: Path
    command: Command
    trial: Undisturbed = field(default_factory=Undisturbed)
    sent: list[bytes] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    @property
    def config(self) -> Mapping[str, str]:
        return self.user.config

    @property
    def servers(self) -> str:
        return self.broker.bootstrap_servers

    def as_administrator(self) -> World:
        """Return the same for a user with all permissions."""
        return replace(self, user=User("admin", self.broker.admin_config), trial=Undisturbed())

    def tried(self, trial: Undisturbed) -> World:
        """Return the same for a role that is run so."""
        return replace(self, trial=trial)

    def value(self) -> bytes:
        """Return what no other message here holds."""
        return MESSAGE + b" %d" % next(self._numbers)

    @contextmanager
    def entered(self, make: Callable[[], AbstractContextManager[T]]) -> Iterator[T]:
        """Start the role's parts; a part that refuses to start is made again."""
        with ExitStack() as opened:
            yield self.trial.attempt(lambda: opened.enter_context(make()))

    def run(self, *arguments: str) -> str:
        """Run a command as the user, and return its output."""

        def once() -> str:
            with mock.patch.dict(os.environ, {"PENSTOCK_CONFIG": json.dumps(dict(self.config))}):
                ended = self.command(*arguments, "--bootstrap-servers", self.servers)
            self.trial.hear(ended.out + ended.err)
            if ended.code not in {0, None}:
                raise FailedCommandError(f"penstock {' '.join(arguments)}: {ended.out}{ended.err}")
            return ended.out

        return self.trial.attempt(once)

    def was_allowed(self, operation: str, name: str) -> bool:
        """Return whether the user has asked for this permission and had it."""
        return any(
            one.allowed and one.operation == operation and one.name == name for one in self.broker.asked(self.user)
        )

    def write(self) -> None:
        """Write a message to the topic as another user."""
        producer = Producer({**self.broker.admin_config, "bootstrap.servers": self.servers, "enable.idempotence": True})
        errors: list[object] = []
        value = self.value()
        producer.produce(self.names["topic"], value, on_delivery=lambda error, _: errors.append(error))
        assert producer.flush(STEP_S) == 0
        assert errors == [None]
        self.sent.append(value)

    def arrived(self, topic: str) -> list[bytes]:
        """Return the values that a reader of committed messages sees in a topic, in any order."""
        found = read_all(self.broker._answering()[0].inside, topic, timeout=STEP_S)
        return sorted(value for message in found if (value := message.value()) is not None)

    def require_all_once(self, topic: str) -> None:
        """Fail unless all that was sent is in a topic once, and nothing else is."""
        assert self.arrived(topic) == sorted(self.sent)
