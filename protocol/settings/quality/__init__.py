"""Settings of what is judged: evaluations, which groups are trained, whether the run is sound."""
