"""One learner rank: takes a batch, steps, pushes, saves.

Reading order: process, rank, coordinator_client, push, checkpoint.
"""
