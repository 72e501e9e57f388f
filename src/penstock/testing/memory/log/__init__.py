"""The logs in memory: topics, records, transactions' markers, and what a fetch sees of them."""
