"""Users' verl tools, unchanged: a YAML file that names classes. Reading order: base_classes, tool, load, toolbox."""
