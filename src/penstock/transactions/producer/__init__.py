"""The transactional producer: transactions in flight, their futures, and the answers to checks."""
