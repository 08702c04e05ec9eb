"""Copies of checkpoints under a URL, made in the background. Reading order: store, copier."""
