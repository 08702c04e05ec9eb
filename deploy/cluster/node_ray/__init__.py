"""Ray's processes on this node."""
