"""What is shown by HTTP: a page of all groups; of one process its page, health, metrics. Needs the extra `web`."""

from penstock.dashboard.address import Address
from penstock.dashboard.dashboard import Dashboard
from penstock.dashboard.endpoints import AppEndpoints, Endpoints, run_with_endpoints
from penstock.dashboard.health import CoordinatorHealth, HealthLimits
from penstock.dashboard.metrics import PrometheusMetrics

__all__ = [
    "Address",
    "AppEndpoints",
    "CoordinatorHealth",
    "Dashboard",
    "Endpoints",
    "HealthLimits",
    "PrometheusMetrics",
    "run_with_endpoints",
]
