"""What our HTTP services share: bodies, limits, tokens, addresses."""
