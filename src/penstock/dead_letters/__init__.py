"""Dead letters: their headers, the reader of a dead-letter topic, and the replay."""
