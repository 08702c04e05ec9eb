"""What a run asks of Ray: the connection, the fleet, learner ranks and rollout servers. The only room with Ray."""
