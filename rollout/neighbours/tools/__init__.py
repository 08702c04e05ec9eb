"""Tools for environments and for the policy, while a run is attached. Begin with: tool, search, calculator, by_name."""
