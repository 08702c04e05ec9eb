"""The command `sluice run`: checks, starts, watches and restarts a run.

Reading order: command, preflight, plan, start, driver, attempt.
"""
