"""Users' OpenRLHF agent files, unchanged. Reading order: base_classes, agent, load, environment."""
