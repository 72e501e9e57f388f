"""The Java that the broker and Spark run on, and the jars: found, or fetched once."""
