"""Checks: which undecided transactions are due, the check requests, the policy behind the last one."""
