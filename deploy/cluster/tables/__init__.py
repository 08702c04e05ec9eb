"""What of a cluster runs, asked and printed as tables."""
