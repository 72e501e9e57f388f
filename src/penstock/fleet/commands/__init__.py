"""Commands to running members through a topic, and the audit of all actions."""
