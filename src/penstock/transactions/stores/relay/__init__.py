"""The relay into Kafka for stores that are not in Kafka."""
