"""An agent of a framework is trained: `agent` is a user's file, `settings.yaml` the run."""
