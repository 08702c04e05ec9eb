"""The embedded quick start: real facts, honest splits, a tiny policy and its demonstrations, made on the spot.

`python -m deploy.quickstart --out DIR` writes it. Files, splits and texts: docs/understand/quick_start.md.
"""
