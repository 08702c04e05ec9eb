"""The command `python -m deploy.cluster`: this node's part of a cluster.

Reading order: command, options, start, kept, wanted_services, node_ray, stop, attached_run, show.
"""
