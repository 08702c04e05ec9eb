"""An engine's half of the weight push: what runs inside vLLM's worker processes.

Reading order: receive, received_push, second_copy, twin, in_place, reload, merged_parts, known_shapes.
"""
