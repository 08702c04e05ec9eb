"""verl's tools files and classes, unchanged, from the setting that names them to the tokens.

Classes are written as verl's own examples are: the imports, decorators, annotations and values of an old release and of
a new one.
"""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import SettingsError
from protocol.settings.tools import ToolsSettings
from protocol.wire import messages as m
from protocol.wire.trajectory import Trajectory
from rollout.environments.base import Chat, Resources, Task
from rollout.environments.verl import base_classes
from rollout.environments.verl.load import load_verl_tools
from rollout.environments.verl.tools import VerlTool, VerlToolbox
from rollout.neighbours.node import Node
from rollout.neighbours.services import Services
from tests.fakes.engines import TokenizingEngine
from tests.fakes.http_servers import Answer, scripted_server
from tests.fakes.playing_session import playing_session
from tests.fakes.rollout_fakes import make_keys, make_spec
from tests.fakes.tool_models import FAMILIES

MODEL = FAMILIES["hermes"]
NEW = """
from typing import Any, Optional
from uuid import uuid4

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.rollout_trace import rollout_trace_op

log = []


class Guess(BaseTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self._instances = {}

    async def create(self, instance_id: Optional[str] = None, **kwargs) -> tuple[str, ToolResponse]:
        instance_id = instance_id or str(uuid4())
        truth = kwargs.get("create_kwargs", {}).get("ground_truth", None)
        self._instances[instance_id] = {"truth": truth, "reward": 0.0}
        log.append(("create", truth))
        return instance_id, ToolResponse()

    @rollout_trace_op
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs) -> tuple[ToolResponse, float, dict]:
        state = self._instances[instance_id]
        state["reward"] = 1.0 if parameters["answer"] == state["truth"] else 0.25
        return ToolResponse(text=f"parsed {parameters['answer']}{self.config['mark']}"), -0.05, {"n": 1}

    async def calc_reward(self, instance_id: str, **kwargs) -> float:
        return self._instances[instance_id]["reward"]

    async def release(self, instance_id: str, **kwargs) -> None:
        del self._instances[instance_id]
        log.append(("release", len(self._instances)))
"""
IMPORT = "from verl.tools.base_tool import BaseTool"
OLD = """
import json
from typing import Optional, Tuple
from verl.tools.base_tool import BaseTool

log = []


class Guess(BaseTool):
    def __init__(self, config: dict, tool_schema):
        super().__init__(config, tool_schema)
        self._instances = {}

    async def create(self, instance_id: Optional[str] = None, ground_truth: Optional[str] = None, **kwargs) -> str:
        self._instances[instance_id] = {"truth": ground_truth, "reward": 0.0}
        log.append(("create", ground_truth))
        return instance_id

    async def execute(self, instance_id: str, parameters: str, **kwargs) -> Tuple[str, float, dict]:
        answer = json.loads(parameters)["answer"]
        state = self._instances[instance_id]
        state["reward"] = 1.0 if answer == state["truth"] else 0.25
        return f"parsed {answer}{self.config['mark']}", -0.05, {}

    async def calc_reward(self, instance_id: str, **kwargs) -> float:
        return self._instances[instance_id]["reward"]

    async def release(self, instance_id: str, **kwargs) -> None:
        del self._instances[instance_id]
        log.append(("release", len(self._instances)))
"""
YAML = """
tools:
  - class_name: "{module}.Guess"
    config:
      type: native
      mark: "!"
    tool_schema:
      type: "function"
      function:
        name: "guess"
        description: "Judges an answer."
        parameters:
          type: "object"
          properties:
            answer:
              type: "string"
              description: "The answer"
          required: ["answer"]
"""
ROW = {"extra_info": {"need_tools_kwargs": True, "tools_kwargs": {"guess": {"create_kwargs": {"ground_truth": "4"}}}}}


def _written(folder: Path, module: str, code: str) -> Path:
    (folder / f"{module.rpartition('.')[2]}.py").write_text(code)
    (folder / "tools.yaml").write_text(YAML.format(module=module))
    return folder / "tools.yaml"


async def _played(path: Path, answers: list[str], tools: ToolsSettings) -> Any:
    said = iter([*(MODEL.call.format(name="guess", arguments=f'{{"answer": "{each}"}}') for each in answers), "Done."])
    engine = TokenizingEngine(lambda context: next(said) + MODEL.end, MODEL.tokenizer())
    limits = {"max_response_tokens": 200, "max_context_tokens": 4096}
    spec = make_spec(environment=f"verl_tools:{path}", **limits).model_copy(update={"tools": tools})
    with scripted_server() as server:
        server.script("reward", Answer({"rewards": [0.5]}))
        node = Node(f"{server.address}/reward", None, "t", make_keys())
        async with Services(spec, node, engine.tokenizer) as services:
            await services.check()
            made = services.make_environment, services.resources, services.rewards
            async with playing_session(engine, *made, **limits) as playing:
                lease = {"prompt": [{"role": "user", "content": "2+2="}], "columns": ROW}
                return await playing.made("e0-a", **lease), engine


@pytest.mark.parametrize(
    ("module", "code"),
    [
        ("guess_new", NEW),
        ("guess_old", OLD),
        (
            "guess_dotted",
            NEW.replace(IMPORT, "import verl.tools.base_tool\n\nBaseTool = verl.tools.base_tool.BaseTool"),
        ),
        # A copy of verl's own tool, with the name that it has in verl.
        ("verl.tools.guess_copied", NEW.replace("from verl.tools.", "from .")),
    ],
)
async def test_tool_of_each_release_is_created_called_and_released(tmp_path: Path, module: str, code: str) -> None:
    trajectory, engine = await _played(_written(tmp_path, module, code), ["5", "4"], ToolsSettings())
    assert isinstance(trajectory, Trajectory), trajectory
    start = trajectory.facts.num_prompt_tokens
    mask = trajectory.loss_mask[start:].astype(bool)
    told = engine.decode(trajectory.tokens[start:][~mask].tolist())
    assert told == MODEL.result.format(text="parsed 5!") + MODEL.result.format(text="parsed 4!")
    assert '"name": "guess"' in engine.decode(trajectory.tokens[:start].tolist())
    # As in verl, a tool's rewards are the tool's own until a setting says otherwise.
    assert trajectory.facts.reward_parts == {"bundled": 0.5}
    assert sys.modules[module].log == [("create", "4"), ("release", 0)]


async def test_process_of_ray_gets_what_copied_modules_define(tmp_path: Path) -> None:
    # As verl's search tool, which works in such a process. It cannot import the modules.
    (tmp_path / "work_copied.py").write_text("def parse(answer):\n    return f'parsed {answer} elsewhere'\n")
    process = "import pickle, sys; kind, parse = pickle.load(sys.stdin.buffer); print(parse(kind.__name__), end='')"
    head = "import subprocess, sys\n\nimport ray\n\nfrom verl.tools.work_copied import parse\n"
    sent = "input=ray.cloudpickle.dumps((type(self), parse)), capture_output=True"
    answer = f'ToolResponse(text=subprocess.run([sys.executable, "-c", {process!r}], {sent}).stdout.decode())'
    code = head + NEW.replace("""ToolResponse(text=f"parsed {parameters['answer']}{self.config['mark']}")""", answer)
    trajectory, engine = await _played(_written(tmp_path, "verl.tools.guess_afar", code), ["4"], ToolsSettings())
    assert isinstance(trajectory, Trajectory), trajectory
    assert MODEL.result.format(text="parsed Guess elsewhere") in engine.decode(trajectory.tokens.tolist())


@pytest.mark.parametrize(("reward", "given"), [("steps", -0.1), ("final", 1.0)])
async def test_rewards_of_a_tool_count_as_the_setting_says(tmp_path: Path, reward: Any, given: float) -> None:
    path = _written(tmp_path, f"guess_{reward}", NEW)
    trajectory, _ = await _played(path, ["5", "4"], ToolsSettings(reward=reward))
    assert trajectory.facts.reward_parts == {"bundled": 0.5, "environment": pytest.approx(given)}


@pytest.mark.parametrize(
    ("module", "code", "problem"),
    [
        ("guess_failing", 'raise OSError("no disk")', "OSError: no disk"),
        ("guess_number", "return 5, 0.0, {}", "a tool answered with 5, expected a text or a ToolResponse"),
    ],
)
async def test_tool_that_raises_or_gives_no_text_fails_the_sample_and_is_released(
    tmp_path: Path, module: str, code: str, problem: str
) -> None:
    failing = NEW.replace("state = self._instances[instance_id]\n", f"{code}\n", 1)
    failed, _ = await _played(_written(tmp_path, module, failing), ["5"], ToolsSettings())
    assert isinstance(failed, m.SampleFailed), failed
    assert (failed.boundary, problem in failed.detail) == ("environment", True), failed.detail
    assert sys.modules[module].log[-1] == ("release", 0)


async def test_each_tool_is_released_whatever_the_release_of_another_does() -> None:
    released = []

    class Tool:
        def __init__(self, name: str) -> None:
            self.name = name

        async def create(self, instance_id: str) -> str:
            return instance_id

        async def execute(self, instance_id: str, parameters: dict[str, Any]) -> tuple[str, float, dict[str, Any]]:
            return "ok", 0.0, {}

        async def release(self, instance_id: str) -> None:
            released.append(self.name)
            if self.name == "first":
                raise OSError("gone")

    tools = {name: VerlTool(Tool(name), {"function": {"name": name}}) for name in ("first", "second")}
    toolbox = VerlToolbox(tools, "none")
    for name in tools:
        await toolbox.answer(name, {})
    with pytest.raises(OSError, match="gone"):
        await toolbox.close()
    assert released == ["first", "second"]


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        ("tools: [", "it is not YAML"),
        ("[]", "it has no list `tools`."),
        ("tools: [{config: {}}]", "tools[0] has no class_name."),
        (
            "tools: [{class_name: a.B, config: {type: mcp}}]",
            "tools[0] has the type mcp: only native tools are run here.",
        ),
        ("tools: [{class_name: nowhere.B}]", "nowhere.B cannot be imported: ModuleNotFoundError"),
        ("tools: [{class_name: verl.tools.gsm8k_tool.Gsm8kTool}]", "cannot be imported: ModuleNotFoundError"),
        ("tools: [{class_name: json.B}]", "json has no class B."),
        ("tools: [{class_name: json.JSONDecoder}]", "json.JSONDecoder cannot be made: TypeError"),
        ("tools: [{class_name: a.B, config: {key: '${oc.env:KEY}'}}]", "it has a value in ${..}"),
    ],
)
def test_tools_file_that_cannot_be_used_is_refused(tmp_path: Path, written: str, problem: str) -> None:
    path = tmp_path / "tools.yaml"
    path.write_text(written)
    with pytest.raises(SettingsError) as refused:
        load_verl_tools(path, ToolsSettings())
    assert str(refused.value).startswith(f"settings: rollout.environment = verl_tools:{path}: ")
    assert problem in str(refused.value)


@pytest.mark.parametrize(
    ("extra_info", "offered"),
    [
        ({}, ["guess", "look"]),
        ({"tool_selection": ["look", "elsewhere"]}, ["look"]),
        ({"tool_selection": []}, ["guess", "look"]),
    ],
)
async def test_row_offers_the_tools_of_its_tool_selection(
    tmp_path: Path, extra_info: dict[str, Any], offered: list[str]
) -> None:
    path = _written(tmp_path, "guess_two", NEW)
    _, _, entry = path.read_text().partition("tools:\n")
    typed = entry.replace('"guess"', '"look"').replace(
        'type: "string"', 'type: ["integer", "number"]\n              enum: [1, 2]'
    )
    path.write_text(f"tools:\n{entry}{typed}")
    environment = load_verl_tools(path, ToolsSettings())(Resources(4, {}, MODEL.tokenizer()))
    prompt = await environment.reset(Task("2+2=", None, {"extra_info": extra_info}))
    assert isinstance(prompt, Chat)
    assert [tool["function"]["name"] for tool in prompt.tools] == offered


def test_copied_tool_is_found_beside_the_tools_file_when_verl_is_installed(tmp_path: Path) -> None:
    installed = tmp_path / "installed" / "verl"
    for package in ("", "tools", "utils"):
        (installed / package).mkdir(parents=True)
        (installed / package / "__init__.py").touch()
    shutil.copy(base_classes.__file__, installed / "tools" / "base_tool.py")
    shutil.copy(base_classes.__file__, installed / "tools" / "schemas.py")
    (installed / "utils" / "rollout_trace.py").write_text("rollout_trace_op = lambda function: function")
    path = _written(tmp_path, "verl.tools.guess_beside", NEW)
    code = f"""
import sys
sys.path.insert(0, {str(installed.parent)!r})
from pathlib import Path
from protocol.settings.tools import ToolsSettings
from rollout.environments.verl.load import load_verl_tools
from rollout.environments.verl.tools import VerlTool, VerlToolbox
load_verl_tools(Path({str(path)!r}), ToolsSettings())
print(sys.modules["verl"].__file__)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.stdout.strip() == str(installed / "__init__.py"), ended.stderr
