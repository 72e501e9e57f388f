"""What a consumer shows of itself: statistics, the explanation of a standstill, the watchdog."""
