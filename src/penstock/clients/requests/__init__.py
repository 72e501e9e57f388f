"""What brokers are asked: topics and their ids, rights; each answer with a bound that we hold."""
