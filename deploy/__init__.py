"""Set-up, cluster start and stop, placement through Ray, settings files."""
