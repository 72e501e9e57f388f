"""What members are asked to do while they run, through a topic, and the audit of it."""
