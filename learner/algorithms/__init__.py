"""The mathematics: pure functions of tensors.

Reading order: by_name, advantages/, losses/, importance, aggregate, kl, whiten, shaping.
"""
