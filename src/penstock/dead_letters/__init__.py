"""Dead letters: the headers that tell of a message's death, reading a dead-letter topic, and replaying it."""
