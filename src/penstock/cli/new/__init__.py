"""`penstock new`: a small project, to begin with; `project` holds its files, with `{name}` for its name."""
