"""What the brokers answer beside messages: topics that are absent or recreated, missing rights, errors."""
