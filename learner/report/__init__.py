"""A run's report.html. Reading order: write, facts, headline, plots, samples. uplot/ is uPlot 1.6.32 (MIT)."""
