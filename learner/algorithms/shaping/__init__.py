"""Reward shaping before advantages are computed, one file each. Together: shape."""
