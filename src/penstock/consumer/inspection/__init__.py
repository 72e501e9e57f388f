"""What a consumer tells of itself: statistics, the explanation of a standstill, the watchdog."""
