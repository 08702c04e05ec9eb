"""Which rows fit the policy: prompts that leave room for an answer, and demonstrations that can be learnt.

Most prompts need no tokenizer, because a text has no more tokens than bytes. The others are encoded. Chat messages and
demonstrations are tokenized in a separate process, because that imports torch.
"""

import multiprocessing
import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

from tokenizers import Tokenizer

from learner.data.prompt_reading import Refusal
from learner.data.prompts import Prompt
from learner.data.sft_forms import BadRowError
from learner.data.sft_rows import RowEncoder
from learner.data.sft_segments import end_not_in, left_out
from protocol.errors import SettingsError
from protocol.message_texts import check_template_kwargs, render_prompt, with_texts
from protocol.node.small_model_files import GENERATION, read_end_tokens
from protocol.settings.settings import Settings

# Tokens that a tokenizer adds around a text, such as begin and end marks.
_ADDED_TOKENS = 64
_NO_TEMPLATE = (
    "is chat messages, and policy.model has no chat template. Set data.apply_chat_template to false, which joins the "
    "messages' texts, or give a model with a template."
)
_Signature = tuple[tuple[str, ...], ...]
T = TypeVar("T")


class PromptLength(NamedTuple):
    """One prompt as the tokenizer sees it."""

    num_tokens: int  # tokens of the prompt with its chat template; 0 when it cannot be rendered
    num_bytes: int  # bytes of the encoded text
    problem: str = ""  # reason why it cannot be rendered; empty when it can


class RowJudge:
    """Returns the reasons why rows cannot be used. It holds a process for the tokenizer once it needs one.

    forms, longest: of the usable demonstrations.
    """

    def __init__(self, model: Path, *, trust_remote_code: bool) -> None:
        self._model, self._trust_remote_code = model, trust_remote_code
        self._has_chat = False  # whether a row needs the chat template, for a model that generates
        self._stops: list[str] = []  # strings that end a turn
        self.forms: Counter[str] = Counter()  # number of rows, by form
        self.longest = 0  # tokens
        self._child: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._child is not None:
            self._child.shutdown(cancel_futures=True)

    def notice_end(self) -> str:
        """Return a notice if the chat template ends an answer where generation does not end; empty otherwise."""
        loading = (self._model, self._trust_remote_code)
        return "".join(self._ask(end_notices, *loading, self._stops)) if self._has_chat else ""

    def _ask(self, work: Callable[..., list[T]], *arguments: object) -> list[T]:
        """Return what a function returns in the tokenizer's process."""
        self._child = self._child or tokenizer_process()
        return self._child.submit(work, *arguments).result()


class DemonstrationJudge(RowJudge):
    """By form, chat template and the model's positions."""

    def __init__(self, model: Path, form: str, *, trust_remote_code: bool) -> None:
        """form: data.form."""
        super().__init__(model, trust_remote_code=trust_remote_code)
        self._form = form

    def __call__(self, prompts: Sequence[Prompt]) -> list[Refusal | None]:
        found = self._ask(
            judge_rows, self._model, self._form, self._trust_remote_code, [one.columns for one in prompts]
        )
        self.forms.update(form for form, problem, *_ in found if not problem)
        self.longest = max([self.longest, *(num_tokens for _, _, num_tokens, _ in found)])
        self._has_chat |= self._form != "reward_pairs" and any(is_chat for *_, is_chat in found)
        return [Refusal(problem) if problem else None for _, problem, *_ in found]


class PromptJudge(RowJudge):
    """By the number of tokens.

    max_tokens: longest accepted prompt; None: the context decides.
    """

    def __init__(self, model: Path, settings: Settings, max_tokens: int | None = None) -> None:
        super().__init__(model, trust_remote_code=settings.policy.trust_remote_code)
        rollout, sampling = settings.rollout, settings.sampling
        self._stops = [] if sampling.only_eval else sampling.stop
        self._template_kwargs = rollout.chat_template_kwargs
        self._context, self._response = rollout.max_context_tokens, rollout.max_response_tokens
        self._max_tokens = max_tokens
        self._truncates = rollout.truncate_left
        self._room = min(self._context - self._response, max_tokens or self._context)
        self._fast: Tokenizer | None = None
        self._template_bytes: dict[_Signature, int] = {}  # bytes that the chat template adds, by roles

    def __call__(self, prompts: Sequence[Prompt]) -> list[Refusal | None]:
        """Return the problem of each prompt, or None. Raises: SettingsError without a usable tokenizer."""
        if self._template_kwargs and self._child is None:
            self._measure([prompt.prompt for prompt in prompts[:1]])  # checks the variables
        self._has_chat |= any(not isinstance(prompt.prompt, str) for prompt in prompts)
        unsure = [place for place, prompt in enumerate(prompts) if not self._surely_fits(prompt.prompt)]
        verdicts: list[Refusal | None] = [None] * len(prompts)
        is_slow = not (self._model / "tokenizer.json").is_file()
        texts = [place for place in unsure if isinstance(prompts[place].prompt, str) and not is_slow]
        for place, length in zip(texts, self._encode([str(prompts[place].prompt) for place in texts]), strict=True):
            verdicts[place] = self._verdict(length)
        others = [place for place in unsure if not isinstance(prompts[place].prompt, str) or is_slow]
        for place, measured in zip(others, self._measure([prompts[place].prompt for place in others]), strict=True):
            verdicts[place] = Refusal(measured.problem) if measured.problem else self._verdict(measured.num_tokens)
            self._learn(prompts[place].prompt, measured)
        return verdicts

    def _surely_fits(self, prompt: str | list[dict[str, Any]]) -> bool:
        if isinstance(prompt, str):
            return not prompt.isspace() and len(prompt.encode()) + _ADDED_TOKENS <= self._room
        signature = _signature(prompt)
        added = self._template_bytes.get(signature) if signature is not None else None
        return added is not None and _content_bytes(prompt) + added + _ADDED_TOKENS <= self._room

    def _learn(self, prompt: str | list[dict[str, Any]], measured: PromptLength) -> None:
        if isinstance(prompt, str) or measured.problem or (signature := _signature(prompt)) is None:
            return
        self._template_bytes[signature] = max(0, measured.num_bytes - _content_bytes(prompt))

    def _verdict(self, num_tokens: int) -> Refusal | None:
        if not num_tokens:
            return Refusal("has no tokens for the tokenizer of policy.model.")
        if num_tokens <= self._room:
            return None
        for_context = self._context - self._response
        if num_tokens <= for_context:
            reason = f"has {num_tokens} tokens, more than data.max_prompt_tokens = {self._max_tokens}."
            return Refusal(reason, is_overlong=True, is_by_setting=True)
        if self._truncates:
            return None
        return Refusal(
            f"has {num_tokens} tokens; rollout.max_context_tokens = {self._context} less rollout.max_response_tokens = "
            f"{self._response} leaves {for_context}. Raise the first, or shorten the prompt.",
            is_overlong=True,
        )

    def _encode(self, texts: Sequence[str]) -> list[int]:
        if not texts:
            return []
        try:
            self._fast = self._fast or Tokenizer.from_file(str(self._model / "tokenizer.json"))
            return [len(encoding.ids) for encoding in self._fast.encode_batch(list(texts))]
        except Exception as error:  # the tokenizers library raises Exception itself
            raise self._unusable(error) from error

    def _measure(self, prompts: Sequence[str | list[dict[str, Any]]]) -> list[PromptLength]:
        if not prompts:
            return []
        try:
            loading = (self._model, self._trust_remote_code, self._template_kwargs)
            return self._ask(measure_prompts, *loading, list(prompts))
        except SettingsError:
            raise
        except Exception as error:  # a tokenizer that cannot be loaded raises anything
            raise self._unusable(error) from error

    def _unusable(self, error: Exception) -> SettingsError:
        reason = " ".join(str(error).split()) or type(error).__name__
        return SettingsError(f"settings: the tokenizer of policy.model = {self._model} cannot be used: {reason[:300]}")


def tokenizer_process() -> ProcessPoolExecutor:
    """Return a process for a tokenizer. It ends with this one, also with one that is killed."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=_end_with_parent)


def _end_with_parent() -> None:
    # Both ends of an executor's pipes are in its process: it would wait for ever, and hold the command's output open.
    def wait() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _signature(messages: Sequence[dict[str, Any]]) -> _Signature | None:
    """Return the roles, which decide what a template adds; None when messages hold more than texts."""
    parts = []
    for message in messages:
        is_plain = len(message) == 2 and message["role"] in ("system", "user", "assistant")
        if not is_plain or not isinstance(message["content"], str) or not message["content"].strip():
            return None
        parts.append((str(message["role"]),))
    return tuple(parts)


def _content_bytes(messages: Sequence[dict[str, Any]]) -> int:
    return sum(len(message["content"].encode()) for message in messages)


def measure_prompts(
    model: Path,
    trust_remote_code: bool,
    template_kwargs: dict[str, Any],
    prompts: Sequence[str | list[dict[str, Any]]],
) -> list[PromptLength]:
    """Return each prompt's length.

    template_kwargs: rollout.chat_template_kwargs. Raises: errors of the tokenizer's loading; SettingsError for
    variables that the chat template does not read.
    """
    tokenizer = _tokenizer(model, trust_remote_code)
    check_template_kwargs(tokenizer, template_kwargs)
    return [_measure_one(tokenizer, prompt, template_kwargs) for prompt in prompts]


@lru_cache(maxsize=1)
def _tokenizer(model: Path, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code)


def _measure_one(tokenizer: Any, prompt: str | list[dict[str, Any]], template_kwargs: dict[str, Any]) -> PromptLength:
    try:
        if isinstance(prompt, str):
            return PromptLength(len(tokenizer.encode(prompt)), len(prompt.encode()))
        if not getattr(tokenizer, "chat_template", None):
            return PromptLength(0, 0, _NO_TEMPLATE)
        messages = with_texts(prompt)
        text = render_prompt(tokenizer, messages, **template_kwargs)
        for message in messages:
            word = left_out(message.get("content"), text) if message.get("role") != "assistant" else None
            if word is not None:
                role = message.get("role")
                return PromptLength(0, 0, f"has a message of the role {role!r}: the chat template leaves out {word!r}")
        return PromptLength(len(tokenizer.encode(text, add_special_tokens=False)), len(text.encode()))
    except Exception as error:  # templates raise whatever jinja does
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        return PromptLength(0, 0, f"cannot be rendered by the tokenizer of policy.model: {reason}")


def end_notices(model: Path, trust_remote_code: bool, stops: Sequence[str]) -> list[str]:
    """Return a notice if the chat template ends an answer where generation does not end. stops: sampling.stop."""
    tokenizer = _tokenizer(model, trust_remote_code)
    ends = read_end_tokens(model) | ({tokenizer.eos_token_id} - {None})
    end = end_not_in(ends, tokenizer)
    if end is None or any(stop in tokenizer.decode([end]) for stop in stops):
        return []
    name, *names = (repr(tokenizer.decode([token])) for token in (end, *sorted(ends)))
    return [
        f"The chat template of policy.model ends an answer with {name}, and generation does not end there, only at "
        f"{' and '.join(names) or 'the limit'}: answers run on to the limit of tokens. Set "
        f'"eos_token_id": {sorted({*ends, end})} in {model / GENERATION}. '
    ]


def judge_rows(
    model: Path, form: str, trust_remote_code: bool, rows: Sequence[dict[str, Any]]
) -> list[tuple[str, str, int, bool]]:
    """Return each row's form, its problem as a sentence (empty: it can be learnt), its longest text in tokens, and
    whether it or an earlier one was written by the chat template.
    """
    encoder = RowEncoder(model, form, trust_remote_code=trust_remote_code)
    found = []
    for row in rows:
        columns, problem, num_tokens = "", "", 0
        try:
            columns = encoder.form_of(row)
            num_tokens = max(len(each.tokens) for each in encoder.encode(row))
        except BadRowError as error:
            problem = f"{error}."
        found.append((columns, problem, num_tokens, encoder.has_chat))
    return found
