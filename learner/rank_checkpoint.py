"""Saving and loading of a run's state by all ranks together: weights, optimizer, the ledger's copy, then the manifest.

Called by `learner.rank`.
"""
