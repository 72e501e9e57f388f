"""What a user registers: functions, how messages are given to them, and what is put around them."""
