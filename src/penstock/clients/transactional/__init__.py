"""One transactional producer, its faults and the end of its transactions: for all who publish in Kafka transactions."""
