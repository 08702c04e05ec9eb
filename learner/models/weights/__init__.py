"""A model's weights as others know them. Reading order: lora, named_weights, pushed, export."""
