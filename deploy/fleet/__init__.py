"""The actor that keeps rollout servers and lends processes for ranks. Reading order: fleet, servers, processes."""
