"""Coordinator, DeepSpeed ranks, algorithms, packing, weight push, checkpoints and reports."""
