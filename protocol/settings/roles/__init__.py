"""Settings of the models beside the policy: critic and reference."""
