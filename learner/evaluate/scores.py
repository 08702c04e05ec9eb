"""The scores of an evaluation read back from its run folder, and shown."""

from pathlib import Path

from rich.table import Table

from learner.disk.metrics_lines import MetricsReader

_PREFIX = "eval/"


def read_scores(folder: Path) -> dict[str, dict[str, float]]:
    """Return, by set, what the newest evaluation of a run came to; {} when none has ended."""
    scores: dict[str, dict[str, float]] = {}
    lines = [line for line in MetricsReader(folder / "metrics.jsonl").new_lines() if "eval_step" in line]
    for key, value in lines[-1].items() if lines else ():
        if key.startswith(_PREFIX):
            name, _, figure = key.removeprefix(_PREFIX).partition("/")
            scores.setdefault(name, {})[figure] = value
    return scores


def scores_table(scores: dict[str, dict[str, float]]) -> Table:
    """Return every figure with its standard error, where it has one."""
    table = Table("set", "figure", title="Scores", title_justify="left")
    table.add_column("value", justify="right")
    for name, figures in scores.items():
        for figure, value in figures.items():
            if figure.endswith("_error"):
                continue
            error = figures.get(f"{figure}_error")
            shown = f"{value:g}" if figure.endswith("num_prompts") else f"{value:.4f}"
            table.add_row(name, figure, shown if error is None else f"{shown} ± {error:.4f}")
    return table
