"""What the policy acts in. Reading order: base, single_turn, search, loading."""
