"""Models under training inside DeepSpeed: forward pass, step, state, export.

Reading order: roles, policy, gradient, training/trained_model, weights/pushed.
"""
