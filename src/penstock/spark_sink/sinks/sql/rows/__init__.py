"""The rows of a batch: validated, deduplicated, staged; and the dead letters of those that are refused."""
