"""When a run is sick, by its own figures, in words. Reading order: rules, watch."""
