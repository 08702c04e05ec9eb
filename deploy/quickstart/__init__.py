"""The embedded quick start: real facts, honest splits, a tiny policy and its demonstrations, made on the spot.

`python -m deploy.quickstart --out DIR [--seed N]` writes `corpus.jsonl`, `train.jsonl`, `eval.jsonl`, `warmstart.jsonl`
and `model/` into DIR; a second call with the same settings finds them made.
"""
