"""Well-known data sets, as their files come, turned into rows that run: `python -m learner.data.prepare NAME`."""
