"""A model's weights as others know them. Reading order: lora, pushed, export."""
