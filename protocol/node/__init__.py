"""The state of a node that its processes share: keys, addresses, the current run, the digest of the code."""
