"""Operators' work on a store: inspection, decisions, the audit log."""
