"""Publishing: Kafka transactions that make decided messages visible, each in a publisher that can be left behind."""
