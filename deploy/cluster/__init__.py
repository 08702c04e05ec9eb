"""The command `python -m deploy.cluster`: this node's part of a cluster.

Reading order: command, options, joining, start, reuse, services, ray_processes, stop, attached_run, tables.
"""
