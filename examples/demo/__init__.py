"""`penstock demo`: the main job, end to end, on a real broker, with a verdict computed from the data itself."""
