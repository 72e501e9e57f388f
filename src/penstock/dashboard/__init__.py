"""What is shown by HTTP: a page of all groups; of one process its page, health, metrics. Needs the extra `web`."""

from penstock.dashboard.address import Address
from penstock.dashboard.dashboard import Dashboard
from penstock.dashboard.endpoints import Endpoints, run_with_endpoints
from penstock.dashboard.health import HealthLimits

__all__ = ["Address", "Dashboard", "Endpoints", "HealthLimits", "run_with_endpoints"]
