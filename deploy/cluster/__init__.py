"""The command `python -m deploy.cluster`: this node's part of a cluster.

Reading order: command, options, home, processes, services, ray_processes.
"""
