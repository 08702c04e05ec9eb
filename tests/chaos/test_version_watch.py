"""The look at vLLM's tokens that `push_faults --vllm` takes: a token of other weights than its version's is counted."""

import math
from pathlib import Path

import pytest

from tests.chaos.rig.vllm_fleet import VersionWatch, Weights
from tests.chaos.rig.vllm_server import PROMPT
from tests.fakes.tiny_models import make_tiny_model


@pytest.mark.parametrize(("said", "off_by", "has_wrong"), [(1, 0.0, False), (2, 0.0, True), (1, math.nan, True)])
def test_tokens_of_other_weights_than_their_versions_are_counted(
    tmp_path: Path, said: int, off_by: float, has_wrong: bool
) -> None:
    weights = Weights(make_tiny_model(tmp_path, tied=False), seed=1)
    for version in (1, 2):
        weights.of(version)
    tokens = [40, 41, 42, 43]
    written = weights.logprobs(1, PROMPT + tokens)[len(PROMPT) - 1 :] + off_by
    watch = VersionWatch({}, weights)
    watch.take("server-0", {"tokens": tokens, "logprobs": written.tolist(), "spans": [(0, 4, said)]})
    watch.close()
    assert (watch.num_tokens, watch.num_wrong > 0, watch.newest["server-0"]) == (4, has_wrong, said)
