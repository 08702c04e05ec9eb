"""The rules of the accounts: each is a query for what breaks it, and a sentence about a row of that query.

A new rule is one entry of RULES. The columns "group" and "step" of a query say where the breach is; the others are put
into the sentence. Queries may use the parameters of `check_rules` and the temporary tables of `_prepare`.
"""

from collections.abc import Iterator
from typing import NamedTuple

from learner.audit.run import AuditedRun, Breach
from learner.audit.steps import Steps, Terms
from learner.data.prompt_order import order_of
from learner.data.prompts import GroupName
from learner.disk.run_folder import LEDGER, TOKENS, parse_metrics_line
from learner.disk.token_books import UNBOOKED
from learner.ledger.ledger import HELD_LINE, NOT_APPLIED

METRICS = "metrics.jsonl"


class Rule(NamedTuple):
    name: str
    sentence: str
    query: str
    file: str = LEDGER


_TRAINED = "FROM group_facts WHERE state = 'trained' AND version IS NOT NULL"
_OF_ITS_STEP = f"{_TRAINED} AND num_trained <= num_of_step"
_WHOLE = f"{_OF_ITS_STEP} AND num_of_step = group_size"

RULES = [
    Rule(
        "ledger_file",
        "is damaged: {damage}",
        "SELECT quick_check AS damage FROM pragma_quick_check(10) WHERE damage != 'ok'",
    ),
    # -- groups: trained once and whole, within the staleness bound, or skipped with a reason
    Rule(
        "trained_once",
        "is trained, but by no step",
        "SELECT \"group\" FROM group_facts WHERE state = 'trained' AND version IS NULL",
    ),
    Rule(
        "trained_once",
        "trajectories of another step, {other}: {number}, expected none",
        'SELECT "group", step, num_trained - num_of_step AS number, '
        f"IIF(first_step != step, first_step, last_step) AS other {_TRAINED} AND num_trained > num_of_step",
    ),
    Rule(
        "trained_once",
        "is {state}, its trajectories that were trained: {num_trained}, expected none",
        'SELECT "group", last_step AS step, state, num_trained FROM group_facts '
        "WHERE state != 'trained' AND num_trained > 0",
    ),
    Rule(
        "trained_once",
        "has trajectories, but no prompt is accounted for by it",
        "SELECT \"group\", MAX(step) AS step FROM trajectories WHERE kind = 'train' "
        'AND "group" NOT IN (SELECT "group" FROM prompts) GROUP BY "group" ORDER BY "group"',
    ),
    Rule(
        "group_size",
        "trajectories of its step: {num_of_step}, expected {group_size}",
        f'SELECT "group", step, num_of_step, group_size {_OF_ITS_STEP} AND num_of_step != group_size',
    ),
    Rule(
        "group_size",
        "trajectories that no step used: {number}, expected none",
        f'SELECT "group", step, num_trajectories - num_of_step AS number {_WHOLE} AND num_trajectories > num_of_step',
    ),
    Rule(
        "group_size",
        "has the samples {first_sample} to {last_sample}, expected 0 to {last}",
        f'SELECT "group", step, first_sample, last_sample, group_size - 1 AS last {_WHOLE} '
        "AND num_trajectories = num_of_step AND (first_sample != 0 OR last_sample != group_size - 1)",
    ),
    Rule(
        "staleness",
        "was trained without a staleness",
        f'SELECT "group", step {_TRAINED} AND num_of_step > 0 AND first_version IS NULL',
    ),
    Rule(
        "staleness",
        "was trained at staleness {staleness}, at most {max_staleness} is allowed",
        f'SELECT "group", step, staleness, max_staleness {_TRAINED} AND num_of_step > 0 AND staleness > max_staleness',
    ),
    Rule(
        "step_version",
        "its staleness was counted from policy version {wrong}, the step was taken on {version}",
        'SELECT "group", step, version, IIF(first_version != version, first_version, last_version) AS wrong '
        f"{_TRAINED} AND num_of_step > 0 AND (first_version != version OR last_version != version)",
    ),
    Rule(
        "step_version",
        "contains policy version {newest_version}, the step was taken on {version}",
        f'SELECT "group", step, newest_version, version {_TRAINED} AND num_of_step > 0 AND first_version IS NOT NULL '
        "AND newest_version > version",
    ),
    Rule(
        "skip_reason",
        "is skipped without a reason",
        "SELECT \"group\", step FROM group_facts WHERE state = 'skipped' AND TRIM(COALESCE(reason, '')) = ''",
    ),
    # -- steps: contiguous, of the right size, applied whole or not at all
    Rule("steps_contiguous", "is not a step: they are counted from 1", "SELECT step FROM step_facts WHERE step < 1"),
    Rule(
        "steps_contiguous",
        "no group is of {missing}, but some are of this one",
        "SELECT step, IIF(step > previous + 2, PRINTF('steps %d to %d', previous + 1, step - 1), "
        "PRINTF('step %d', previous + 1)) AS missing "
        "FROM (SELECT step, LAG(step, 1, 0) OVER (ORDER BY step) AS previous FROM step_facts WHERE step >= 1) "
        "WHERE step > previous + 1",
    ),
    Rule(
        "step_whole",
        "{num_trained} of its groups are trained and {num_skipped} skipped: a step is applied whole or not at all",
        "SELECT step, num_trained, num_skipped FROM step_facts WHERE step >= 1 AND num_trained AND num_skipped",
    ),
    Rule(
        "step_size",
        "groups trained: {num_trained}, expected {groups_per_step}",
        "SELECT step, num_trained, groups_per_step FROM step_facts "
        "WHERE step >= 1 AND num_trained AND NOT num_skipped AND num_trained != groups_per_step",
    ),
    Rule(
        "step_size",
        "was not applied; groups skipped for it: {num_skipped}, expected {groups_per_step}",
        "SELECT step, num_skipped, groups_per_step FROM step_facts "
        "WHERE step >= 1 AND NOT num_trained AND num_skipped != groups_per_step",
    ),
    Rule(
        "not_applied_reason",
        "is skipped with its step for the reason {reason!r}, expected one that begins {not_applied!r}",
        "SELECT \"group\", step, COALESCE(reason, '') AS reason, :not_applied AS not_applied FROM prompts "
        "WHERE state = 'skipped' AND step IS NOT NULL AND COALESCE(reason, '') NOT LIKE :not_applied || '%' "
        "ORDER BY step, position",
    ),
    Rule(
        "policy_version",
        "says policy version {stored}, but {applied} steps were applied",
        "SELECT :policy_version AS stored, :applied AS applied WHERE stored != applied",
    ),
    # -- lineage: nothing was trained on weights that a later start took back
    Rule(
        "lineage",
        "trajectories were made for start {incarnation} of the run, which has started {num_starts} times",
        "SELECT DISTINCT incarnation, :num_starts AS num_starts FROM trajectories "
        "WHERE step IS NOT NULL AND incarnation > :num_starts ORDER BY incarnation",
    ),
    Rule(
        "lineage",
        "contains policy version {newest} of start {incarnation}, after which the run began again at {valid}",
        'SELECT t."group", t.step, MAX(t.newest_version) AS newest, t.incarnation, s.valid FROM trajectories AS t '
        "JOIN (SELECT incarnation, (SELECT MIN(policy_version) FROM incarnations WHERE number > incarnation) AS valid "
        "FROM (SELECT DISTINCT incarnation FROM trajectories)) AS s ON s.incarnation = t.incarnation "
        "WHERE t.step IS NOT NULL AND t.newest_version > s.valid "
        'GROUP BY t."group", t.incarnation ORDER BY t.step, t."group"',
    ),
    # -- token books: all tokens of every server's session, and at least those of the trajectories
    Rule(
        "token_books",
        "session {session}: its server generated {num_generated} tokens, the books have {booked}",
        "SELECT s.session, s.num_generated, COALESCE(SUM(a.num_tokens), 0) AS booked FROM books.sessions AS s "
        "LEFT JOIN books.attempts AS a USING (session) GROUP BY s.session HAVING booked > s.num_generated",
        TOKENS,
    ),
    Rule(
        "token_books",
        "sample {sample_index}, attempt {attempt}: its trajectory has {num_used} of its tokens, the books {num_tokens}",
        UNBOOKED,
        TOKENS,
    ),
    # -- metrics.jsonl has the ledger's steps and numbers
    Rule("metrics", "line {number} is not a metrics line", "SELECT number FROM lines WHERE line_step IS NULL", METRICS),
    Rule(
        "metrics",
        "line {number} follows step {previous}",
        "SELECT line_step AS step, number, previous FROM line_facts WHERE line_step != previous + 1",
        METRICS,
    ),
    Rule(
        "metrics",
        "line {number} follows step 0",
        "SELECT line_step AS step, number FROM lines WHERE line_step = 0 AND number > 1 AND NOT EXISTS "
        "(SELECT 1 FROM lines AS earlier WHERE earlier.number < lines.number AND earlier.line_step > 0)",
        METRICS,
    ),
    Rule(
        "metrics",
        "line {number} says {name} {stated}, the ledger {value:.7g}",
        "SELECT line_step AS step, number, name, IIF(stated IS NULL, 'None', PRINTF('%.7g', stated)) AS stated, value "
        # Lines keep seven digits. An infinite number is never within the bound, which is finite.
        "FROM line_values WHERE stated IS NULL OR ABS(stated - value) > MAX(1e-9, 1e-6 * ABS(value))",
        METRICS,
    ),
    Rule(
        "metrics",
        "line {number} is of a step that the ledger does not know",
        "SELECT line_step AS step, number FROM line_facts WHERE line_step > :last + 1",
        METRICS,
    ),
    # A line that waits for an evaluation is missing rightly.
    Rule(
        "metrics",
        "no line tells of step 0, whose evaluation the ledger has",
        "SELECT 1 WHERE :first = 1 AND :held != 0 AND NOT EXISTS (SELECT 1 FROM lines WHERE line_step = 0) "
        "AND EXISTS (SELECT 1 FROM trajectories WHERE kind = 'eval' AND \"group\" GLOB 'eval-0-*')",
        METRICS,
    ),
    Rule(
        "metrics",
        "no line tells of {missing}, which the ledger accounts for",
        "SELECT IIF(newest = :last - 1, PRINTF('step %d', :last), PRINTF('steps %d to %d', newest + 1, :last)) "
        "AS missing FROM (SELECT COALESCE(MAX(line_step), :first - 1) AS newest FROM line_facts) "
        "WHERE newest < :last AND NOT (newest = :last - 1 AND :held = :last)",
        METRICS,
    ),
]

_TABLES = [
    """CREATE TEMP TABLE step_facts (step INTEGER PRIMARY KEY, num_trained, num_skipped, version, version_after,
    group_size, groups_per_step, max_staleness)""",
    # Invalid lines have no line_step.
    "CREATE TEMP TABLE lines (number, line_step, policy_version, num_samples, num_tokens, reward_mean, staleness_max)",
]
_FACTS = [
    """CREATE TEMP TABLE group_facts AS
    SELECT p."group" AS "group", p.state AS state, p.step AS step, p.reason AS reason,
        COUNT(t."group") AS num_trajectories, COUNT(t.step) AS num_trained,
        COALESCE(SUM(t.step = p.step), 0) AS num_of_step, MIN(t.step) AS first_step, MAX(t.step) AS last_step,
        MIN(t.sample_index) AS first_sample, MAX(t.sample_index) AS last_sample, MAX(t.staleness) AS staleness,
        MIN(t.oldest_version + t.staleness) AS first_version, MAX(t.oldest_version + t.staleness) AS last_version,
        MAX(t.newest_version) AS newest_version, s.version AS version, s.group_size AS group_size,
        s.max_staleness AS max_staleness
    FROM prompts AS p LEFT JOIN trajectories AS t ON t."group" = p."group" AND t.kind = 'train'
    LEFT JOIN step_facts AS s ON s.step = p.step GROUP BY p."group" ORDER BY p."group"
    """,
    # A line of step 0 before the first step is the evaluation of the starting policy.
    """CREATE TEMP TABLE line_facts AS SELECT *, COALESCE(MAX(line_step) OVER (
        ORDER BY number ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), {first} - 1) AS previous
    FROM lines WHERE line_step > 0 OR line_step IS NOT NULL AND EXISTS (
        SELECT 1 FROM lines AS earlier WHERE earlier.number < lines.number AND earlier.line_step > 0)
    """,
    """CREATE TEMP VIEW line_values AS
    WITH trained AS (
        SELECT t.step, COUNT(*) AS num_samples, SUM(num_model_tokens) AS num_tokens,
            AVG(reward * {scored}) AS reward_mean, COALESCE(MAX(staleness), 0) AS staleness_max
        FROM trajectories AS t JOIN step_facts AS s ON s.step = t.step
        WHERE kind = 'train' AND num_trained GROUP BY t.step)
    SELECT line_step, number, 'policy_version' AS name, policy_version AS stated, version_after AS value
    FROM line_facts JOIN step_facts ON step = line_step
    UNION ALL SELECT line_step, number, 'num_samples', l.num_samples, t.num_samples
    FROM line_facts AS l JOIN trained AS t ON t.step = line_step
    UNION ALL SELECT line_step, number, 'num_model_tokens', l.num_tokens, t.num_tokens
    FROM line_facts AS l JOIN trained AS t ON t.step = line_step
    UNION ALL SELECT line_step, number, 'reward_mean', l.reward_mean, t.reward_mean
    FROM line_facts AS l JOIN trained AS t ON t.step = line_step
    UNION ALL SELECT line_step, number, 'staleness_max', l.staleness_max, t.staleness_max
    FROM line_facts AS l JOIN trained AS t ON t.step = line_step
    ORDER BY number
    """,
]


def check_rules(run: AuditedRun, steps: Steps, terms: Terms) -> Iterator[Breach]:
    """Yield the breaches of every rule, and prompts that were left out or taken twice."""
    yield from _check_order(run)
    first = first_line_step(run)
    _prepare(run, steps, terms, first)
    parameters = {
        "last": steps.last,
        "first": first,
        "held": held_step(run),
        "num_starts": int(run.meta("incarnation") or 0),
        "policy_version": int(run.meta("policy_version") or 0),
        "applied": steps.policy_version_after(steps.last),
        "not_applied": NOT_APPLIED,
    }
    for rule in RULES:
        rows = run.db.execute(rule.query, parameters)
        columns = [column[0] for column in rows.description]
        for row in rows:
            values = dict(zip(columns, row, strict=True))
            problem = rule.sentence.format(**values)
            yield Breach(rule.name, problem, rule.file, values.get("group"), values.get("step"))


def note_metrics(run: AuditedRun, steps: Steps) -> list[str]:
    """Return facts about metrics.jsonl that a reader should know and that break no rule.

    The coordinator writes a step's line just before it commits the step: a running or killed run may be one line ahead,
    and its last line may be cut off. A line that waits for an evaluation leaves the file one line behind.
    """
    notes = []
    newest = [step for step in (values[0] for _, values in _lines(run)) if step is not None]
    if (first := first_line_step(run)) > 1:
        notes.append(
            f"{METRICS}: begins at step {first}; earlier ones are in the folder that the run was resumed from."
        )
    if run.metrics and not run.metrics.endswith(b"\n"):
        notes.append(f"{METRICS}: the last line is cut off, as a kill leaves it.")
    if max(newest, default=0) == steps.last - 1 == held_step(run) - 1:
        notes.append(f"{METRICS}: the line of step {steps.last} waits for an evaluation; the next start writes it.")
    if steps.last + 1 in newest:
        notes.append(f"{METRICS}: the line of step {steps.last + 1} was written, its step not yet committed.")
    return notes


def held_step(run: AuditedRun) -> int:
    """Return the step of the line that waits for an evaluation, -1 without one."""
    line = parse_metrics_line(run.meta(HELD_LINE) or "")
    return -1 if line is None else int(line["step"])


def first_line_step(run: AuditedRun) -> int:
    """Return the step that the metrics rightly begin with: 1, or that of a start from another run's checkpoint.

    Of a start without a name, in an older ledger, the run is not known.
    """
    first = next((values[0] for _, values in _lines(run) if values[0]), 1)
    before, starts = None, set[int]()
    runs = "SELECT from_step, MAX(IIF(name = 'run', value, NULL)) FROM terms GROUP BY from_step ORDER BY from_step"
    for from_step, name in run.rows(runs):
        if name is None or name != before:
            starts.add(from_step)
        before = name
    return int(first) if first in starts else 1


def _prepare(run: AuditedRun, steps: Steps, terms: Terms, first: int) -> None:
    """Make the temporary tables: the steps with their terms, the groups with their trajectories' sums, the lines."""
    for table in _TABLES:
        run.db.execute(table)
    for step, account in steps.accounts.items():
        after, of = steps.policy_version_after(step), terms.at(step)
        counts = (step, account.num_trained, account.num_skipped, account.policy_version, after)
        settings = (of.group_size, of.groups_per_step, of.max_staleness)
        run.db.execute("INSERT INTO step_facts VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (*counts, *settings))
    run.db.executemany("INSERT INTO lines VALUES (?, ?, ?, ?, ?, ?, ?)", ((n, *values) for n, values in _lines(run)))
    is_scored = str(int(not run.settings.is_of_rows))
    for table in _FACTS:
        run.db.execute(table.replace("{first}", str(first)).replace("{scored}", is_scored))


def _lines(run: AuditedRun) -> Iterator[tuple[int, tuple[float | None, ...]]]:
    """Yield the number of every whole line, from 1, and its columns in `lines`."""
    whole, _, _ = run.metrics.rpartition(b"\n")
    names = ("step", "policy_version", "data/num_samples", "data/num_model_tokens", "reward/mean", "data/staleness_max")
    # Rows are not scored: their lines have no reward, and the ledger has signs of answers in its place.
    unscored = {"reward/mean": 0.0} if run.settings.is_of_rows else {}
    for number, text in enumerate(whole.split(b"\n") if whole else [], start=1):
        line = parse_metrics_line(text) or {}
        yield number, tuple((unscored | line).get(name) for name in names)


def _check_order(run: AuditedRun) -> Iterator[Breach]:
    """Yield positions without a prompt, with two, or with another prompt than the run's seed and data give."""
    data = run.settings.data
    order = order_of(run.rows_by_entry or [len(run.uids)], data.weights(), run.settings.run.seed, data.shuffle)
    expected = 0
    previous = ""
    for position, epoch, uid, group in run.rows(
        'SELECT position, epoch, uid, "group" FROM prompts ORDER BY position, "group"'
    ):
        if position < expected:
            problem = f"is at position {position}, " + (f"where {previous} is too" if expected else "before the first")
            yield Breach("positions", problem, group=group)
            continue
        if position > expected:
            yield _gap(expected, position)
        expected, previous = position + 1, group
        due_epoch, index = order.at(position)
        due = str(GroupName("train", due_epoch, run.uids[index]))
        if (epoch, uid, group) != (due_epoch, run.uids[index], due):
            problem = f"is prompt {uid} of epoch {epoch} at position {position}, where the prompt order has {due}"
            yield Breach("prompt_order", problem, group=group)
    num_drawn = int(run.meta("position") or 0)
    if num_drawn > expected:
        yield _gap(expected, num_drawn)
    elif num_drawn < expected:
        problem = f"says that {num_drawn} prompts were given out, but one is at position {expected - 1}"
        yield Breach("positions", problem)


def _gap(first: int, end: int) -> Breach:
    which = f"position {first}" if end == first + 1 else f"positions {first} to {end - 1}"
    return Breach("positions", f"given out, but without a prompt: {which}")
