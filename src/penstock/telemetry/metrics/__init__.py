"""Metrics: what is observed when a reader asks, of consumers, coordinators and queries."""
