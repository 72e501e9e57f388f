"""The options that the coordinators of all stores have in common, checked once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.clients.transactional.pace import MOST_S
from penstock.options import a_telemetry, positive, seconds
from penstock.transactions.core.check_plan import CheckPolicy, require_checks
from penstock.transactions.core.discard import require_discard

if TYPE_CHECKING:
    from penstock.telemetry import Telemetry
    from penstock.transactions.model import DiscardPolicy


@dataclass(frozen=True, slots=True)
class CoordinatorOptions:
    """What every coordinator is given, whatever its store. Names, units and meaning are those of `Coordinator`.

    Raises:
        ConfigurationError: one of them is wrong.
    """

    transaction_timeout: float = 6.0
    check_interval: float = 30.0
    check_max: int = 15
    check_backoff: float = 1.0
    discard: DiscardPolicy = "topic"
    check_timeout: float = 30.0
    publish_timeout: float = MOST_S
    session_timeout: float = 10.0
    telemetry: Telemetry | None = None

    def __post_init__(self) -> None:
        positive("transaction_timeout", self.transaction_timeout)
        positive("check_interval", self.check_interval)
        seconds("check_timeout", self.check_timeout)
        seconds("publish_timeout", self.publish_timeout)
        positive("session_timeout", self.session_timeout)
        require_checks(self.check_max, self.check_backoff)
        require_discard(self.discard)
        a_telemetry(self.telemetry)

    @property
    def policy(self) -> CheckPolicy:
        """When the producers of a transaction are asked about it, and how often."""
        return CheckPolicy(self.transaction_timeout, self.check_interval, self.check_max, self.check_backoff)
