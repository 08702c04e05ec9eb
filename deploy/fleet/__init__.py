"""The actor that keeps rollout servers and lends processes for ranks. Reading order: fleet, hosted_server, standby."""
