"""What happens on lanes: the lane processor, the worker threads and the event loop that call handlers."""
