"""Runs member processes: starts and restarts them, sends signals, and prints their output line by line."""
