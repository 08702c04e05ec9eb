"""The names of what lies in a run folder."""

LEDGER = "ledger.sqlite"


CHECKPOINTS = "checkpoints"


WANDB_ID = "wandb_run_id"


LOCK = ".lock"


RECORDS = ("metrics.jsonl", "samples.jsonl")


# What SQLite keeps beside a ledger that is open, or whose writer was killed.
LOGS = (f"{LEDGER}-wal", f"{LEDGER}-shm")
