"""Models under training inside DeepSpeed: forward pass, step, state, export.

Reading order: policy, logprobs, state, export.
"""
