"""Every setting of a run, one file per section. Reading order: settings, loader, run_spec."""
