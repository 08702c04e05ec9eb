"""The command that scores a model folder without training it. Reading order: command, scores."""
