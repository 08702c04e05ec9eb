"""What one node has: its home, its processes, and the keeper of its services.

Reading order: home, processes, service_health, restarts, watched_service, keeper.
"""
