"""What may be done from the dashboard: actions by HTTP, behind a token, each in the audit. Needs the extra `web`."""

from penstock.fleet.actions.endpoints import routes
from penstock.fleet.actions.performing import Surroundings
from penstock.fleet.actions.tokens import dashboard_token

__all__ = ["Surroundings", "dashboard_token", "routes"]
