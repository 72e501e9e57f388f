"""Reports about a consumer: statistics, details, and the explain server."""
