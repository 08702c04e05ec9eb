"""`sluice audit RUN_DIR`: prove that nothing of a run was lost or trained twice, or name what broke.

Reading order: run, steps, rules, checkpoints, report, command.
"""

from learner.audit.command import main as main
from learner.audit.report import audit_run_folder as audit_run_folder
