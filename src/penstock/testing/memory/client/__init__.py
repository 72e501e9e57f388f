"""The clients of the Kafka in memory: what a consumer fetches, joins and commits, and what a producer sends."""
