"""Calls to a service that may fail: retries, circuit breaker, kept connections.

Reading order: endpoint, failures, circuit_breaker, pool.
"""
