"""Testing aids, public: a Kafka in memory whose clock you move, and an app driven on it step by step."""
