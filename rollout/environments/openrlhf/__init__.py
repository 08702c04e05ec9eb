"""Users' OpenRLHF agent files, unchanged. Reading order: load, agent."""
