"""Calling a service that may fail: retries, circuit breaker, kept connections.

Reading order: endpoint, retries, circuit_breaker, pool.
"""
