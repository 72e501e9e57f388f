"""Monitoring and control of all processes of an app: reports, commands, actions, the page and the probes.

Public names are imported lazily, because reports and commands need no web server. The page and the probes need the
extra `web`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.fleet.address import Address
    from penstock.fleet.page.server import Dashboard
    from penstock.fleet.probes.endpoints import AppEndpoints, Endpoints, run_with_endpoints
    from penstock.fleet.probes.health import CoordinatorHealth, HealthLimits
    from penstock.fleet.probes.metrics import PrometheusMetrics

_MODULE_OF = {
    "Address": "address",
    "AppEndpoints": "probes.endpoints",
    "CoordinatorHealth": "probes.health",
    "Dashboard": "page.server",
    "Endpoints": "probes.endpoints",
    "HealthLimits": "probes.health",
    "PrometheusMetrics": "probes.metrics",
    "run_with_endpoints": "probes.endpoints",
}

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


def __getattr__(name: str) -> Any:
    """Import a public name from its module."""
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'penstock.fleet' has no attribute {name!r}")
    value = getattr(import_module(f"penstock.fleet.{module}"), name)
    globals()[name] = value
    return value
