"""Environments of the policy. Reading order: base, search, loading, guard."""
