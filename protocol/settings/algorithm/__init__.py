"""Settings of the algorithm: its names, recipes, loss and KL, and what contradicts itself."""
