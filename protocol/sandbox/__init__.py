"""Runs untrusted Python: programs written by the policy. Reading order: run, inside, system_calls."""
