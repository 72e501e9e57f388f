"""What runs around handlers: middlewares, lifespans, and what each worker has one of."""
