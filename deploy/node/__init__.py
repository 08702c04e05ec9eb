"""One node: its home, its processes, and the keeper of its services.

Reading order: home, processes, service, keeper.
"""
