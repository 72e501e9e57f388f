"""Transactions of a half partition that are not settled: what is ready, and what the others wait for. Pure."""
