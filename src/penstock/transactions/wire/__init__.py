"""What stands in the topics of a store: records, ids, names. Pure."""
