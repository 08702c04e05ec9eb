"""HTTP reward services and their scorers. They know nothing of training."""
