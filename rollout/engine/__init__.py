"""The vLLM engine and the weights in it.

Reading order: engine, start, generation, version_gate, turn_scheduler, weights.
"""
