"""Values with a schema in a registry (Avro, JSON Schema, Protobuf) as columns of Spark."""
