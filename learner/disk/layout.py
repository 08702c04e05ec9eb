"""The names of what lies in a run folder."""

LEDGER = "ledger.sqlite"


# As the run's last start resolved them.
SETTINGS = "settings.yaml"


CHECKPOINTS = "checkpoints"


WANDB_ID = "wandb_run_id"


LOCK = ".lock"


# Where each prompt of data.train lies; rows that the run began without.
TRAIN_INDEX = "prompts.npz"
SKIPPED_ROWS = "skipped_rows.json"


RECORDS = ("metrics.jsonl", "samples.jsonl", "evaluations.jsonl")


# What SQLite keeps beside a ledger that is open, or whose writer was killed.
LOGS = (f"{LEDGER}-wal", f"{LEDGER}-shm")
