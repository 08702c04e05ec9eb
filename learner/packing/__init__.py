"""How trajectories become micro-batches. Reading order: plan, micro_batch."""
