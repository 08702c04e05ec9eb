"""Log-probabilities in place of logits. Reading order: scored_model, head_logprobs."""
