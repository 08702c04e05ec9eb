"""Views of a running run: panel, plain lines, Weights & Biases; and the alarms of its health."""
