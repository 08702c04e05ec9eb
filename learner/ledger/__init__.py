"""The ledger of a run. Reading order: schema, ledger, snapshots."""
