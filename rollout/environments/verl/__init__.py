"""Users' verl tools, unchanged: a YAML file that names classes. Reading order: load, tools, base_classes."""
