"""Checks: which undecided transactions are due, the questions to producer groups, the policy behind the last one."""
