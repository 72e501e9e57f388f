"""The Java for the broker and Spark, and Kafka's jars: found, or fetched once."""
