"""Nothing that a step, a probe or a push computes mixes the model's device with another: shown on a pretended one."""

import json

from tests.fakes.warm_process import run_warm
from tests.learner.models import pretended_device

ON_DEVICE = f"{pretended_device.NAME}:0"


def test_step_probe_and_push_stay_on_the_models_device() -> None:
    ended = run_warm("tests.learner.models.pretended_device", timeout=200)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    # The test sees: what mixes devices on purpose is refused.
    assert "FakeTensorDeviceMismatchError" in found.pop("a loss that keeps a tensor on the CPU")
    assert len(found) == 19
    assert found == dict.fromkeys(found, ON_DEVICE)
