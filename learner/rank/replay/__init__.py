"""`sluice replay RUN STEP`: a step's batch, kept and trained again. Reading order: kept_steps, ranks, command."""
