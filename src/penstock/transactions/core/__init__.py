"""The rules for pending transactions of all stores: state, queue, checks, quarantine, checkpoints."""
