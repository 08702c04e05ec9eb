"""A prompt and one answer, which the reward services judge."""

from rollout.environments.base import Prompt, Resources, Step, Task, Turn


class SingleTurn:
    """Ends after the policy's first turn, at its end of text or at rollout.max_response_tokens."""

    stop: tuple[str, ...] = ()

    def __init__(self, resources: Resources) -> None:
        pass

    async def reset(self, task: Task) -> Prompt:
        return task.prompt

    async def step(self, turn: Turn) -> Step:
        return Step(is_done=True)
