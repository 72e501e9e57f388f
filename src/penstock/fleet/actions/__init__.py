"""Actions of the dashboard: by HTTP, behind a token, each in the audit. Needs the extra `web`."""
