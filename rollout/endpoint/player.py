"""Makes samples by agents: opens a session for each, and returns the trajectory of the agent's conversation.

lease -> play -> AgentSession -> an agent's requests -> turns of the engine
                              -> its reward or end   -> score -> Trajectory
"""

import asyncio
import copy
import ctypes

from protocol.errors import NeighbourError
from protocol.http.listen import address_of
from protocol.settings.run_spec import RunSpec
from protocol.wire.trajectory import Trajectory
from rollout.endpoint.app import EndpointServer, listen, make_endpoint_app
from rollout.endpoint.programs import AgentPrograms
from rollout.endpoint.rendering import Rendering
from rollout.endpoint.requests import SessionSampling
from rollout.endpoint.session import AgentSession
from rollout.endpoint.sessions import Sessions
from rollout.engine.version_gate import VersionGate
from rollout.environments.agents import AgentProgram, AgentTask
from rollout.episodes.conversation import AGENT, Conversations, Generator, SampleTask, Scorer, WrittenSoFar

# A program that reported its reward over HTTP has this long to end.
_PROGRAM_GRACE_S = 10.0
_M_ARENA_MAX, _NUM_ARENAS = -8, 2  # glibc's parameter of mallopt, and its value


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
        """Return a player that listens. program: called for each sample; None: external programs request samples.

        token: the cluster's, which external programs send. Raises: OperatorError when agents.host cannot be used.
        """
        _limit_arenas()
        # Copying a tokenizer takes up to a second.
        kwargs = spec.rollout.chat_template_kwargs
        rendering = await asyncio.to_thread(
            Rendering, engine.tokenizer, spec.tools.call_format, kwargs, engine.end_tokens
        )
        conversations = Conversations(engine, gate, spec.rollout, server, spec.sampling)
        return cls(conversations, rendering, program, scorer, spec, token)

    def __init__(
        self,
        conversations: Conversations,
        rendering: Rendering,
        program: AgentProgram | None,
        scorer: Scorer,
        spec: RunSpec,
        token: str,
    ) -> None:
        self.num_dropped_conversations = 0  # conversations of finished samples that are not trained
        self.sessions = Sessions(token, spec.agents.idle_timeout_s)
        self._conversations = conversations
        self._spec = spec
        self._scorer = scorer
        self._rendering = rendering
        listener = listen(spec.agents.host, spec.agents.port)
        self.base_url = f"{address_of(listener)}/v1"
        self._http = EndpointServer(make_endpoint_app(self.sessions, rendering, self.base_url), listener)
        self._programs = None if program is None else AgentPrograms(program)

    @property
    def is_accepting(self) -> bool:
        """False while no external program requests samples."""
        return self._programs is not None or self.sessions.has_demand

    async def play(self, sample: SampleTask, written: WrittenSoFar | None = None) -> Trajectory:
        """Return the finished trajectory. written: updated with each turn.

        Raises: NeighbourError naming "agent", "engine", "reward:<name>" or "trajectory".
        """
        session = AgentSession(
            sample,
            self._conversations,
            written or WrittenSoFar(),
            self._rendering,
            self._spec.agents,
            self._sampling_of(sample),
        )
        self.sessions.open(session, is_offered=self._programs is None)
        program = self._start_program(session)
        try:
            conversation, finish, num_dropped = await session.result
        except BaseException:
            if program is not None:
                program.cancel()
            raise
        finally:
            # The reason applies if the session has not ended, because this call was cancelled.
            self.sessions.close(session, "its lease was taken back")
        if program is not None:
            asyncio.get_running_loop().call_later(_PROGRAM_GRACE_S, program.cancel)
        prompt, response = await self._rendering.run(self._rendering.texts, conversation.transcript)
        trajectory = await conversation.finish_scored(finish, prompt, response, self._scorer)
        if not trajectory.facts.reward_parts:
            problem = "gave no reward, and rewards.endpoints is empty. Report a reward, or name an endpoint"
            raise NeighbourError(AGENT, problem)
        self.num_dropped_conversations += num_dropped
        return trajectory

    async def close(self) -> None:
        """Close every session, the programs and the address."""
        self.sessions.close_all("the run has left this server")
        if self._programs is not None:
            await self._programs.close()
        await self._http.close()
        self._rendering.close()

    def _start_program(self, session: AgentSession) -> "asyncio.Future[float | None] | None":
        """Start the sample's program. Its end is the end of the session. None: an external program plays the sample."""
        if self._programs is None:
            return None
        task = copy.deepcopy(session.sample.task)  # the program may use up its row, which reward services get
        agent_task = AgentTask(
            self.base_url, session.end.api_key, task.prompt, task.label, task.columns, task.is_greedy
        )
        program = asyncio.wrap_future(self._programs.start(agent_task))

        def on_end(ended: "asyncio.Future[float | None]") -> None:
            if ended.cancelled():
                return
            error = ended.exception()
            if isinstance(error, NeighbourError):
                session.fail(error)
            elif error is None:
                session.on_program_end(ended.result())

        program.add_done_callback(on_end)
        return program

    def _sampling_of(self, sample: SampleTask) -> SessionSampling:
        temperature = None if sample.task.is_greedy else sample.temperature or self._spec.rollout.temperature
        return SessionSampling(temperature, self._spec.agents.other_sampling)


def _limit_arenas() -> None:
    """Limit the memory pools of this process's threads.

    glibc gives each new thread a pool of its own, which keeps what the thread frees: a server would grow with each
    attached run, by 70 MB in nine small ones.
    """
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_M_ARENA_MAX, _NUM_ARENAS)
