"""The mathematics: pure functions of tensors.

Reading order: by_name, advantages/, losses/, corrections/, aggregate, kl, whiten, shaping/.
"""
