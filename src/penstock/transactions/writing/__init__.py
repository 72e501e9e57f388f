"""Writing to Kafka: acknowledged sends, and what Kafka transactions need wherever one is made."""
