"""What both halves of a weight push agree on. Reading order: controls, wire, digest, group."""
