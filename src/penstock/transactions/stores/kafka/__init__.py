"""The store in Kafka topics."""
