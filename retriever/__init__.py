"""The per-node retrieval service and its index. It knows nothing of training."""
