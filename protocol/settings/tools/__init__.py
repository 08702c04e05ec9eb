"""Settings of the tools that a policy may call. Reading order: offered, outside."""
