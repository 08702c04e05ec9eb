"""The end of a sample: its conversation scored, and the trajectory that is sent."""

import time

from protocol.wire.trajectory import Finish, Trajectory
from rollout.episodes.conversation import Conversation
from rollout.episodes.sample import Scorer
from rollout.neighbours.reward_client import ScoreRequest


async def finish_scored(
    conversation: Conversation, how: Finish, prompt: str, response: str, scorer: Scorer
) -> Trajectory:
    """Return the conversation's trajectory, with the reward that the services give it.

    prompt, response: the text of its tokens, names of control tokens kept.
    Raises: NeighbourError naming "reward:<name>" or "trajectory".
    """
    clock = time.perf_counter()
    sample = conversation.sample
    score = await scorer.score(ScoreRequest(sample.key, prompt, response, sample.task.label, sample.task.columns))
    scored_s = time.perf_counter() - clock
    return conversation.finish(how, score.reward, score.parts, scored_s, score.filter_score, score.logs)
