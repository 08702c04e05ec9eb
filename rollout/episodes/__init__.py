"""One sample, from prompt to trajectory. Reading order: sample, player, transcript."""
