"""A run's calls to Ray: the connection, the fleet, learner ranks and rollout servers."""
