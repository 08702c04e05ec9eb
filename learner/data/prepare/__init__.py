"""Well-known data sets, as their files come, turned into rows that run: `sluice prepare-data NAME`."""
