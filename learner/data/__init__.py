"""Training data: prompts, their order, and demonstrations."""
