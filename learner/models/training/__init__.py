"""Training of any model: DeepSpeed, optimizer, state. Begin with trained_model."""
