"""What the driver asks brokers before it plans: ends, topics that went missing, open transactions."""
