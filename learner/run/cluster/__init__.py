"""What is asked of the cluster through Ray, call by call. Reading order: ray_door, fleet, processes, servers."""
