"""The logs in memory: topics, records and the markers of transactions."""
