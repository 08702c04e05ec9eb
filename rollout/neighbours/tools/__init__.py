"""Tools of environments and of the policy, while a run is attached. Begin with tool, calculator, by_name."""
