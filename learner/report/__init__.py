"""A run's report.html. Reading order: write, facts, headline, curves, samples, timeline, svg."""
