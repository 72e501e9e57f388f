"""The engine that makes decided transactions of every store visible, by Kafka transactions."""
