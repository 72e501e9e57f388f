"""What a process shows by HTTP: whether it lives, whether it is ready, its metrics. Needs the extra `web`."""

from penstock.dashboard.address import Address
from penstock.dashboard.endpoints import Endpoints, run_with_endpoints
from penstock.dashboard.health import HealthLimits

__all__ = ["Address", "Endpoints", "HealthLimits", "run_with_endpoints"]
