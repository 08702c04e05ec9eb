"""Runs from outside: which uses the cluster, its output, its end."""
