"""One file for each correction of the behaviour policy."""
