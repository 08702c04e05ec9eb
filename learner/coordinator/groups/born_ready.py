"""Groups of rows to learn from: each is ready at its birth, and no server makes its samples.

Window, ledger, steps and resume hold as for generated groups.
"""

from functools import partial
from itertools import groupby

import numpy as np

from learner.coordinator.accounts import Accounts
from learner.coordinator.groups.group import Group, LeaseStamp
from learner.coordinator.groups.open_groups import OpenGroups
from learner.coordinator.groups.prompt_source import PromptSource
from learner.data.sft_rows import RowEncoder, SftRow
from protocol.wire.trajectory import Trajectory, TrajectoryFacts, VersionSpan

SOURCE = "data"  # stands in the place of a server


class BornReady:
    """The source of finished groups in place of the rollout servers."""

    def __init__(self, groups: OpenGroups, source: PromptSource, encoder: RowEncoder, accounts: Accounts) -> None:
        self._groups = groups
        self._source = source
        self._encoder = encoder
        self._run = accounts.mailbox.run_id, accounts.mailbox.incarnation
        self._number = 0  # groups born in this start

    def fill(self, version: int, is_admitting: bool, now: float) -> None:
        """Fill the window with groups of this policy version. is_admitting: new rows may be taken."""
        while (group := self._groups.next_group(is_admitting)) is not None:
            self._number += 1
            self._groups.lease(group, SOURCE, version, now, LeaseStamp(*self._run, 0, self._number), [])
            another = partial(self._source.another, group.position)
            for index, row in enumerate(self._encoder.encode(group.prompt.columns, another)):
                self._groups.accept(group, trajectory_of(group, index, row, version, self._run[1]))
        self._groups.held_by(SOURCE)  # forgets the groups that are back


def trajectory_of(group: Group, index: int, row: SftRow, version: int, incarnation: int) -> Trajectory:
    """Return a row as a sample of its group, by index: its learnt tokens count as the policy's."""
    mask = (row.weights > 0.0).astype(np.uint8)
    facts = TrajectoryFacts(
        group=group.name,
        sample_index=index,
        attempt=group.attempt,
        incarnation=incarnation,
        kind="train",
        is_greedy=False,
        server=SOURCE,
        num_tokens=len(row.tokens),
        num_prompt_tokens=int(mask.argmax()),
        num_turns=1,
        finish="stop",
        reward=row.reward,
        reward_parts={},
        version_spans=_spans(mask.tolist(), version),
        started_at=0.0,
        finished_at=0.0,
        generate_s=0.0,
        environment_s=0.0,
        reward_s=0.0,
    )
    trajectory = Trajectory(facts, row.tokens, np.zeros(len(row.tokens), np.float32), mask)
    trajectory.check()
    return trajectory


def _spans(mask: list[int], version: int) -> list[VersionSpan]:
    spans, end = [], 0
    for is_learnt, run in groupby(mask):
        start, end = end, end + len(list(run))
        if is_learnt:
            spans.append(VersionSpan(start, end, version))
    return spans
