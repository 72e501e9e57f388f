"""What the brokers tell beside messages: topics that are gone or made anew, rights that are missing, errors."""
