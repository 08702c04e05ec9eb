"""The running step and its line of metrics. Reading order: current_step, step_batch, record."""
