"""What is done with a lane that is held, the same on threads and on the event loop."""
