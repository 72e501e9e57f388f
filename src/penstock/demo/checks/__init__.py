"""What the demo promised, computed in other ways from the data, and compared with what is there."""
