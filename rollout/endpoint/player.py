"""Makes samples by agents: opens a session for each, and makes a trajectory of what its agent had the policy write.

lease -> play -> AgentSession -> an agent's requests -> SampleTurns -> engine
                              -> its reward or end   -> scored     -> Trajectory
"""

import asyncio
import functools
import time
from concurrent.futures import Future

from protocol.errors import NeighbourError
from protocol.http.listen import address_of
from protocol.settings.run_spec import RunSpec
from protocol.wire.trajectory import Finish, Trajectory
from rollout.endpoint.agent_session import AgentSession
from rollout.endpoint.app import make_endpoint_app
from rollout.endpoint.bodies import Drawn, RewardBody
from rollout.endpoint.http_thread import HttpThread, listen
from rollout.endpoint.open_sessions import OpenSessions
from rollout.endpoint.programs import AgentPrograms
from rollout.endpoint.rendering import Rendering
from rollout.endpoint.sample_turns import Ended, SampleTurns
from rollout.engine.version_gate import VersionGate
from rollout.environments.agents import AgentProgram, AgentTask
from rollout.episodes.conversation import Conversation, Conversations
from rollout.episodes.sample import AGENT, Generator, SampleTask, Scorer, WrittenSoFar
from rollout.episodes.scoring import finish_scored

# A program that reported its reward over HTTP is left so long to come to its end.
_PROGRAM_ENDS_S = 10.0


class AgentPlayer:
    """Plays samples of one run. Open with `await AgentPlayer.open(...)`, and close it."""

    @classmethod
    async def open(
        cls,
        engine: Generator,
        gate: VersionGate,
        program: AgentProgram | None,
        scorer: Scorer,
        spec: RunSpec,
        server: str,
        token: str,
    ) -> "AgentPlayer":
        """Return a player that listens. program: called for each sample; None: programs outside ask for samples.

        token: the cluster's, which such programs bring. Raises: OperatorError when agents.host cannot be listened on.
        """
        # Tokenizers are large: copying one takes up to a second.
        rendering = await asyncio.to_thread(Rendering, engine.tokenizer, spec.tools.call_format)
        return cls(engine, gate, program, scorer, spec, server, token, rendering)

    def __init__(
        self,
        engine: Generator,
        gate: VersionGate,
        program: AgentProgram | None,
        scorer: Scorer,
        spec: RunSpec,
        server: str,
        token: str,
        rendering: Rendering,
    ) -> None:
        self.num_cut_observations = 0
        self.num_dropped_conversations = 0  # of finished samples, not trained
        self._conversations = Conversations(engine, gate, spec.rollout, server, spec.sampling)
        self._spec = spec
        self._scorer = scorer
        self._rendering = rendering
        self._sessions = OpenSessions(token, spec.agents.idle_timeout_s)
        listener = listen(spec.agents.host, spec.agents.port)
        self.base_url = f"{address_of(listener)}/v1"
        self._http = HttpThread(make_endpoint_app(self._sessions, rendering, self.base_url), listener)
        self._programs = None if program is None else AgentPrograms(program)

    @property
    def is_accepting(self) -> bool:
        """False while nobody would play a sample: no program outside asks for one."""
        return self._programs is not None or self._sessions.is_asked_for

    async def play(self, sample: SampleTask, written: WrittenSoFar | None = None) -> Trajectory:
        """Return the finished trajectory. written: counts up with each turn that the engine ends.

        Raises: NeighbourError naming "agent", "engine", "reward:<name>" or "trajectory".
        """
        opened_at = time.time()
        turns = SampleTurns(self._conversations, sample, written or WrittenSoFar())
        session = AgentSession(turns, self._rendering, self._spec.agents, self._drawn(sample))
        self._http.call(self._sessions.open, session, self._programs is None)
        program = self._started(session)
        try:
            ended = await self._ended(session, turns, program)
        finally:
            self._http.call(self._sessions.close, session, "its lease was taken back")
            if program is not None:
                asyncio.get_running_loop().call_later(_PROGRAM_ENDS_S, program.cancel)
        conversation = self._noted(ended, opened_at)
        how = self._how(conversation, ended)
        prompt, response = await self._rendering.texts(conversation.transcript)
        trajectory = await finish_scored(conversation, how, prompt, response, self._scorer)
        if not trajectory.facts.reward_parts:
            problem = "gave no reward, and rewards.endpoints names nobody who does. Report one, or name an endpoint"
            raise NeighbourError(AGENT, problem)
        self.num_dropped_conversations += ended.num_dropped
        return trajectory

    async def close(self) -> None:
        """End every session, the programs and the address."""
        self._http.call(self._sessions.close_all, "the run has left this server")
        if self._programs is not None:
            await self._programs.close()
        await self._http.close()
        self._rendering.close()

    def _started(self, session: AgentSession) -> "Future[float | None] | None":
        if self._programs is None:
            return None
        task = session.turns.sample.task
        given = AgentTask(self.base_url, session.end.api_key, task.prompt, task.label, task.columns, task.is_greedy)
        program = self._programs.start(given)
        program.add_done_callback(functools.partial(self._on_program_end, session))
        return program

    def _on_program_end(self, session: AgentSession, program: "Future[float | None]") -> None:
        """End a session whose program has; in the programs' thread."""
        if program.cancelled():
            return
        error = program.exception()
        if isinstance(error, NeighbourError):
            self._http.call(session.fail, error)
        elif error is None:
            reward = program.result()
            self._http.call(session.returned, None if reward is None else RewardBody(reward=reward))

    async def _ended(self, session: AgentSession, turns: SampleTurns, program: "Future[float | None] | None") -> Ended:
        """Return how the agent ended; a sample that is taken back takes its program along."""
        try:
            ended = await turns.ended
        except asyncio.CancelledError:
            if program is not None:
                program.cancel()
            raise
        if ended.error is not None:
            if program is not None:
                program.cancel()
            raise ended.error
        return ended

    def _noted(self, ended: Ended, opened_at: float) -> Conversation:
        """Return the conversation to train, with what its agent said of it."""
        conversation = ended.trained
        if conversation is None:
            raise NeighbourError(AGENT, "ended without a turn of the policy")
        # What came behind these the agent never read: its reward says nothing of it.
        transcript = conversation.transcript = conversation.transcript.up_to(ended.num_turns)
        transcript.started_at = opened_at
        transcript.environment_s = max(0.0, time.time() - opened_at - transcript.generate_s)
        transcript.add_reward(ended.reward)
        dropped = {"dropped_conversations": float(ended.num_dropped)} if ended.num_dropped else {}
        transcript.add_figures(ended.score, {**ended.logs, **dropped})
        return conversation

    def _how(self, conversation: Conversation, ended: Ended) -> Finish:
        last = conversation.transcript.turns[-1]
        if ended.is_out_of_room or (last.finish == "length" and conversation.is_full):
            return "context"
        return last.finish

    def _drawn(self, sample: SampleTask) -> Drawn:
        temperature = None if sample.task.is_greedy else sample.temperature or self._spec.rollout.temperature
        return Drawn(temperature, self._spec.agents.other_sampling)
