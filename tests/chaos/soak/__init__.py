"""A run on real processes among faults that a seed draws, for as long as one likes."""
