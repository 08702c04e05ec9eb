"""Shared parts of our HTTP services: bodies, limits, tokens, addresses."""
