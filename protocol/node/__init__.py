"""What a node keeps for all processes: keys, tokens, addresses, the digest of the code."""
