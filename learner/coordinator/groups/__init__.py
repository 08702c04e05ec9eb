"""The groups that are open: where prompts come from, what of them is back, evaluations."""
