"""The ledger of a run: what became of every prompt. Reading order: schema, ledger, snapshot, snapshots."""
