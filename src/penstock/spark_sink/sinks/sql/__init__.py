"""`SqlSink`: rows into a table of a database, by upsert or append, with the ledger in the same transaction."""
