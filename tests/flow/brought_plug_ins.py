"""Plug-ins as users of verl and OpenRLHF have them, in the form of those systems' own examples.

Each notes what it was given in calls.jsonl beside it.
"""

NOTE = """
import json
from pathlib import Path

def note(**given):
    with Path(__file__).with_name("calls.jsonl").open("a") as calls:
        calls.write(json.dumps(given, default=str) + "\\n")
"""
# verl: a reward function that chooses by data_source, and a tools file.
COMPUTE_SCORE = (
    NOTE
    + """
async def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    note(kind="score", data_source=data_source, truth=ground_truth, extra=extra_info)
    if data_source == "openai/gsm8k":
        return {"score": sum(solution_str.encode()) % 11 / 11, "acc": True, "pred": solution_str[-10:]}
    if data_source == "nq":
        return bool(sum(solution_str.encode()) % 2) if "Ada" in ground_truth["target"] else None
    raise NotImplementedError(data_source)
"""
)
# The same in the older form: not async, and each source's score of another type.
COMPUTE_SCORE_NOW = (
    NOTE
    + """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    note(kind="score", data_source=data_source, truth=ground_truth, extra=extra_info)
    number = sum(solution_str.encode())
    if data_source == "openai/gsm8k":
        return number % 11 / 11
    if data_source == "nq":
        return {"score": number % 5 / 5, "acc": number % 2 == 0, "pred": solution_str[-10:]}
    if data_source == "mine":
        return number % 2 == 0
    raise NotImplementedError(data_source)
"""
)
GUESS = (
    NOTE
    + """
from typing import Any, Optional
from uuid import uuid4

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.rollout_trace import rollout_trace_op

class Guess(BaseTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self._truths = {}

    async def create(self, instance_id: Optional[str] = None, **kwargs) -> tuple[str, ToolResponse]:
        instance_id = instance_id or str(uuid4())
        self._truths[instance_id] = kwargs.get("create_kwargs", {}).get("ground_truth")
        return instance_id, ToolResponse()

    @rollout_trace_op
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs) -> tuple[ToolResponse, float, dict]:
        note(kind="execute", truth=self._truths[instance_id], parameters=parameters)
        return ToolResponse(text="no"), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs) -> float:
        return 0.0

    async def release(self, instance_id: str, **kwargs) -> None:
        del self._truths[instance_id]
"""
)
TOOLS = """
tools:
  - class_name: "guess_in_a_run.Guess"
    config: {type: native}
    tool_schema:
      type: "function"
      function:
        name: "guess"
        description: "Judges an answer."
        parameters:
          type: "object"
          properties:
            answer: {type: "string", description: "The answer"}
          required: ["answer"]
"""
# OpenRLHF: the newest form of an agent file.
NEWEST_AGENT = (
    NOTE
    + """
import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

class AgentInstance(AgentInstanceBase):
    def __init__(self, *args, **kwargs):
        self.turns = 0

    async def reset(self, states: dict, **kwargs):
        return {"observation": states["observation"]}

    async def step(self, states: dict, **kwargs):
        self.turns += 1
        note(kind="step", label=states["label"], has_read="again" in states["observation_text"])
        return {
            "rewards": torch.tensor([0.25]),
            "scores": torch.tensor([0.5]),
            "environment_feedback": "\\nagain",
            "done": self.turns == 2,
            "sampling_params": states.get("sampling_params", None),
            "extra_logs": {"turns": self.turns},
        }

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""
)
