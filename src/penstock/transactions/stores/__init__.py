"""The stores of halves and decisions (Kafka, database, files) and their coordinators."""
