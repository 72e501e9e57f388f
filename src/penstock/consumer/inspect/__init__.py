"""What a consumer shows of itself: statistics, details, the explain server."""
