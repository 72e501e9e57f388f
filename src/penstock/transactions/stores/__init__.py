"""Where halves and decisions are kept: in Kafka, in a database or in files; and the coordinators of all three."""
