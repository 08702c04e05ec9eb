"""What training any model takes, whatever it is for: DeepSpeed, optimizer, state. Begin with trained_model."""
