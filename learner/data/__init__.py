"""What is trained on: prompts, their order, demonstrations."""
