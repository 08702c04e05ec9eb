"""Checks before anything starts, and the usable rows of a data set. Begin with preflight."""
