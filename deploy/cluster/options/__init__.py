"""What a start of the cluster can be told. Reading order: start_options, then how single options are read."""
