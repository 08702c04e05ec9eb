"""An engine's half of the weight push: code that runs inside vLLM's worker processes.

Reading order: receive, reload.
"""
