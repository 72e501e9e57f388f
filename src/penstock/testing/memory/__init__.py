"""A Kafka in memory: broker, clients, group coordinator, transactions and faults, on a clock that tests move."""
