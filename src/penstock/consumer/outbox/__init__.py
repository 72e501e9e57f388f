"""The one way out of a consumer: results, dead letters and retry messages, sent plainly or in Kafka transactions."""
