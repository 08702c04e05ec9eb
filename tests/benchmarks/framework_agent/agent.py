"""An agent of the OpenAI Agents SDK that works out products with a calculator: Sluice gives it an address and a key."""

from agents import Agent, AgentsException, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

from rollout.environments.agents import AgentTask

set_tracing_disabled(True)  # nothing is sent to OpenAI
openai = AsyncOpenAI(base_url="http://of-each-task", api_key="of each task", timeout=300.0)


@function_tool
def calculator(expression: str) -> str:
    """Work out a product, such as 12*34."""
    left, _, right = expression.partition("*")
    return str(int(left) * int(right))


async def solve(task: AgentTask) -> float:
    client = openai.with_options(base_url=task.base_url, api_key=task.api_key)
    agent = Agent("accountant", model=OpenAIChatCompletionsModel("policy", client), tools=[calculator])
    try:
        result = await Runner.run(agent, str(task.prompt), max_turns=3)
    except AgentsException:  # the policy called what there is not, or went on calling
        return 0.0
    return float(result.final_output == f"<answer>{task.label}</answer>")
