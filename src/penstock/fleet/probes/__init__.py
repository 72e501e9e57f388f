"""What one process shows by HTTP: its health, its metrics, its own page."""
