"""Where the processes of a run go: a pure function of settings, model sizes and nodes. Begin with topology."""
