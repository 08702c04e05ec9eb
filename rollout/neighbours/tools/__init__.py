"""Tools of environments and of the policy. Reading order: tool, calculator, by_name."""
