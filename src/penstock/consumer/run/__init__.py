"""What calls handlers: worker threads and an event loop, and what interrupts a call."""
