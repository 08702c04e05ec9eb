"""What is checked before anything starts, and which rows of a data set are used. Begin with preflight."""
