"""Runs Python that nobody has read: what a policy wrote. Reading order: limits, run, inside, system_calls."""
