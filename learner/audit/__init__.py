"""`python -m learner.audit RUN_DIR`: prove that nothing of a run was lost and nothing trained twice, or say what was.

One module for each idea: what is checked (order, groups, steps, lineage, metrics, checkpoints), what is counted
(epochs, waste, deciles), and what is made of it (breach, report, view).
"""

from learner.audit.command import main as main
from learner.audit.report import audit_run_folder as audit_run_folder
