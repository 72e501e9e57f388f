"""The outbox of a consumer: sends results, dead letters and retry messages, plainly or in Kafka transactions."""
