"""`sluice chat MODEL`: talk with a model in the terminal. It may call the bundled tools, as in a run. Optional."""

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from protocol.errors import NeighbourError, OperatorError
from protocol.message_texts import render_prompt
from protocol.one_line import one_line
from protocol.settings.loader import load_saved_settings
from protocol.settings.paths import find_trained
from protocol.settings.run_spec import run_spec
from protocol.settings.settings import Settings
from protocol.settings.tools import BUNDLED_TOOLS
from rollout.engine.speaker import Speaker
from rollout.environments.base import Chat as PromptChat
from rollout.environments.base import Messages, Turn
from rollout.environments.tool_use.call_formats import choose_reader
from rollout.environments.tool_use.tool_use import SharedTools, ToolUse
from rollout.episodes.chat_tokens import ChatTokens
from rollout.neighbours.node import this_node
from rollout.neighbours.tools.by_name import open_tools
from rollout.neighbours.tools.tool import Tool

_ABOUT = """\
Talk with a model folder, the folder of a run, or a Hugging Face name. /new begins a new conversation, Ctrl-C stops an
answer, Ctrl-D ends the chat. A model without a chat template continues each line as a text, and so does the model of a
run whose prompts were texts."""
_MAX_ROUNDS = 16  # turns that may call tools before the user speaks again
_MAX_CALLS = 16  # in one turn
_WORD = "zebra"  # content of a message that shows what the template writes behind it


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser("sluice chat", description=_ABOUT, allow_abbrev=False)
    parser.add_argument("model", metavar="MODEL", help="model folder, Hugging Face name, or the folder of a run")
    about = "system message of each conversation; of a run: as it was trained"
    parser.add_argument("--system", metavar="TEXT", help=about)
    parser.add_argument(
        "--tool", action="append", default=[], choices=BUNDLED_TOOLS, help="offer a tool of this node; may be repeated"
    )
    parser.add_argument("--temperature", type=float, default=1.0, help="0: the likeliest token each time")
    parser.add_argument("--max-tokens", type=int, default=1024, help="longest answer in tokens")
    parser.add_argument(
        "--chat-template-kwargs",
        metavar="JSON",
        help='variables of the chat template, such as {"enable_thinking": false}; of a run: as it was trained',
    )
    parser.add_argument(
        "--text",
        action=argparse.BooleanOptionalAction,
        help="continue each line as a text, without the chat template; of a run: as it was trained",
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="run code of the model folder")
    options = parser.parse_args(arguments)
    of_run = settings_of_run(options.model)
    options.model, run = find_trained(options.model)
    variables = template_kwargs(of_run, options.chat_template_kwargs)
    system = system_of(of_run, "" if options.text and options.system is None else options.system)
    tools = open_tools(options.tool, run_spec(of_run, "chat", 1, ""), this_node()) if options.tool else {}
    with asyncio.Runner() as runner:
        try:
            for tool in tools.values():
                runner.run(tool.check())
            call_format = of_run.tools.call_format
            speaker = Speaker(options)
            is_text = options.text
            if is_text is None and not tools and system is None:
                is_text = asked_texts(run, of_run, speaker.tokenizer)
            chat = Chat(speaker, system, [*tools.values()], runner, variables, call_format, is_text=bool(is_text))
            for notice in describe_form(of_run, chat.is_text):
                print(notice, file=sys.stderr)
            while (line := _read_line()) is not None:
                chat.take(line)
        finally:
            for tool in tools.values():
                runner.run(tool.close())
    return 0


class Chat:
    """One terminal's conversations."""

    def __init__(
        self,
        speaker: Speaker,
        system: str | None,
        tools: Sequence[Tool],
        runner: asyncio.Runner,
        template_kwargs: Mapping[str, Any] | None = None,
        call_format: str = "auto",
        *,
        is_text: bool = False,
    ) -> None:
        """runner: runs the tools. template_kwargs: as of `ChatTokens`. call_format: as of `choose_reader`.

        is_text: continue each line as a text, although the model has a chat template.
        Raises: OperatorError, SettingsError when the model's template cannot do this."""
        self._speaker = speaker
        self._tokenizer = speaker.tokenizer
        if not self._tokenizer.chat_template and (tools or system):
            raise OperatorError("The model has no chat template: leave out --tool and --system.")
        if is_text and (tools or system):
            raise OperatorError("--text continues a line without the chat template: leave out --tool and --system.")
        self.is_text = is_text or not self._tokenizer.chat_template
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._messages: Messages = [*self._system]
        ends = speaker.end_tokens
        self._texts = ChatTokens(self._tokenizer, template_kwargs, ends)
        self._reader = choose_reader(call_format, self._tokenizer, template_kwargs, ends) if tools else None
        self._toolbox = SharedTools(tools)
        self._runner = runner

    def take(self, line: str) -> None:
        """Answer a line. After Ctrl-C or a failure the conversation is what it was before the line."""
        before = [*self._messages]
        try:
            if line == "/new":
                self._messages = [*self._system]
            elif line and self.is_text:
                self._speaker.write(self._texts.prompt(line), keep_control_tokens=False)
            elif line:
                self._answer(line)
        except KeyboardInterrupt:
            self._messages = before
            print("\n(stopped; the line is forgotten)", file=sys.stderr)
        except NeighbourError as error:
            self._messages = before
            print(f"\n(no answer, the line is forgotten: {one_line(error, 500)})", file=sys.stderr)

    def _answer(self, line: str) -> None:
        environment = (
            ToolUse(_MAX_ROUNDS, self._toolbox, self._reader, _MAX_CALLS) if self._reader is not None else None
        )
        self._messages.append({"role": "user", "content": line})
        while True:
            prompt = self._texts.prompt(PromptChat(self._messages, [*self._toolbox.schemas]))
            text, finish = self._speaker.write(prompt, keep_control_tokens=environment is not None)
            step = self._runner.run(environment.step(Turn(text, finish))) if environment is not None else None
            results = cast(Messages, step.observation or []) if step is not None else []
            self._messages += [self._message(text, results), *results]
            if not results:
                return
            for result in results:
                print(f"[{result['name']}] {result['content']}")

    def _message(self, text: str, results: Messages) -> dict[str, Any]:
        """Return the model's turn as a message, with the calls that have results."""
        if self._reader is None or not results:
            return {"role": "assistant", "content": text}
        content, calls = self._reader.read(text)
        written = [
            {
                "id": result["tool_call_id"],
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call, result in zip(calls, results, strict=True)
            if call.problem is None
        ]
        calls_part = {"tool_calls": written} if written else {}
        return {"role": "assistant", "content": content if written else text, **calls_part}


def settings_of_run(model: str) -> Settings:
    """Return the settings of the run that trained a model; the default ones for another model."""
    _, run = find_trained(model)
    settings = run / "settings.yaml" if run is not None else None
    return load_saved_settings(settings) if settings is not None and settings.is_file() else Settings()


def system_of(run: Settings, given: str | None) -> str | None:
    """Return the system message: the given one (none if it is empty), or that of the model's run."""
    return (run.data.system_prompt if given is None else given) or None


def asked_texts(folder: Path | None, run: Settings, tokenizer: Any) -> bool:
    """Return whether a run's prompts were texts that the chat template did not write.

    That depends on the rows and the environment, so the first recorded sample shows it: a prompt of the template ends
    with what begins the model's turn. Without a sample data.apply_chat_template decides.
    """
    record = folder / "samples.jsonl" if folder is not None else None
    if not tokenizer.chat_template or record is None or not record.is_file():
        return run.data.apply_chat_template is False
    with record.open(encoding="utf-8") as file:
        sample = json.loads(file.readline() or "{}")
    if "tokens" not in sample:
        return run.data.apply_chat_template is False
    asked = tokenizer.decode(sample["tokens"][: sample["num_prompt_tokens"]])
    chat = render_prompt(tokenizer, [{"role": "user", "content": _WORD}], **run.rollout.chat_template_kwargs)
    return not asked.rstrip().endswith(chat.rpartition(_WORD)[2].strip())


def describe_form(run: Settings, is_text: bool) -> list[str]:
    """Return sentences about how a line is asked, where the form of the run's prompts is not that of a chat."""
    notices = []
    if is_text:
        notices.append("The model continues each line as a text, without a chat template.")
    if run.data.template is not None:
        notices.append(f"The run's prompts were written by data.template = {run.data.template!r}: write lines like it.")
    return notices


def template_kwargs(run: Settings, given: str | None) -> dict[str, Any]:
    """Return the variables of the chat template: those given as JSON, or of the model's run.

    Raises: OperatorError.
    """
    if given is None:
        return run.rollout.chat_template_kwargs
    try:
        found = json.loads(given)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise OperatorError(
            f"--chat-template-kwargs {given} is not a JSON object. Give one, such as '{{\"enable_thinking\": false}}'."
        )
    return found


def _read_line() -> str | None:
    """Return the terminal's next line; None at its end or after Ctrl-C."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        return None
