"""Which node gets which process of a run: from settings and nodes to a place for each."""
