"""All processes of an app, seen and commanded: `reports/`, `commands/`, `actions/`, the `page/` and the `probes/`.

Names are loaded when they are asked for: reports and commands need no web server. The page and the probes need the
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

_HOME_OF = {
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
    """Load a public name from the module it lives in."""
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'penstock.fleet' has no attribute {name!r}")
    value = getattr(import_module(f"penstock.fleet.{home}"), name)
    globals()[name] = value
    return value
