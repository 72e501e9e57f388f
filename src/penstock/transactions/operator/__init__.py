"""What an operator sees of a store and may do there."""
