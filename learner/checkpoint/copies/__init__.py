"""Copies of whole checkpoints elsewhere: under a URL, in the background of the training."""
