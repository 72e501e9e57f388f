"""What an action is: it says what it would do, and does it. On a thread that may be left behind."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from penstock.fleet.actions.parameters import Parameters
from penstock.fleet.commands.sender import ANSWER_S, CommandSender
from penstock.fleet_member import CommandSettings, Outcome
from penstock.options import ClientConfig

#: Returns which members of a group listen to commands, as far as that is known.
Members = Callable[[str], Collection[str]]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What actions work with: a cluster, and who there is."""

    bootstrap_servers: str
    #: Passwords are among them.
    config: ClientConfig
    commands: CommandSettings
    members: Members
    #: Seconds that members have for an answer.
    answer_s: float = ANSWER_S


@dataclass(frozen=True, slots=True)
class Asked:
    """Under what an action runs.

    Attributes:
        id: of the action, in the audit.
        by: who asked, in words.
        at_ms: when, in milliseconds since the epoch.
    """

    id: str
    by: str
    at_ms: int


@dataclass(frozen=True, slots=True)
class Result:
    """What came of an action, in one sentence."""

    outcome: Outcome
    said: str
    details: str | None = None


class Action(Protocol):
    """One action with its parameters."""

    @property
    def group(self) -> str:
        """What it is about: the key of its records in the audit."""

    def plan(self, around: Surroundings) -> Result:
        """Return what it would do; REFUSED where it could not. Changes nothing."""

    def run(self, around: Surroundings, asked: Asked, sender: CommandSender) -> Result:
        """Do it. Raises `PenstockError` where it was refused, and anything else where it broke off."""


MakeAction = Callable[[Parameters], Action]
