"""The command that runs an app."""
