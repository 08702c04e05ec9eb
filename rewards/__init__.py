"""HTTP reward services, knowing nothing of training: sample -> exact_match or user_function -> service -> serve."""
