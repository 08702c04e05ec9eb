"""Training on own answers: generate (answers to prompts), select (rows from them), iterate (rounds with training)."""
