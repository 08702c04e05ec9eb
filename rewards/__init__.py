"""HTTP reward services, knowing nothing of training: sample -> a scorer or user_function -> service -> serve."""
