"""Answers to the user's prompts, sampled by transformers alone from the weights that the plain loop has just now.

Rewards are drawn: they depend on the answer's tokens and the seed, and on nothing else. What is compared is arithmetic,
not what is learned, and rewards that always differ make every answer count.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from learner.data.prompts import Prompt
from learner.disk.model_folder import read_max_positions
from learner.models.world import own_device
from protocol.errors import OperatorError
from protocol.settings.settings import Settings
from tests.textbook.answer import Answer
from tests.textbook.loop import Textbook


class Rollouts:
    """A transformers model for itself, whose weights are the plain loop's."""

    def __init__(self, settings: Settings, model: Path, prompts: Sequence[Prompt], loop: Textbook) -> None:
        """Raises: OperatorError when no prompt can be answered."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        trust = settings.policy.trust_remote_code
        self._settings, self._folder, self._loop = settings, model, loop
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model, trust_remote_code=trust)
        self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, trust_remote_code=trust)
        self._model.eval().to(own_device())
        self._prompts = self._readable(prompts)
        self._place = 0
        self._model.generation_config = self._drawing()
        self._ends = self._model.generation_config.eos_token_id or []
        self.logprob_difference = 0.0  # largest between transformers' own forward pass and the learner's, nats
        torch.manual_seed(settings.run.seed)

    def groups(self) -> Iterator[list[Answer]]:
        """Yield one prompt's answers after another, in file order and over again, from the loop's present weights."""
        while True:
            prompt = self._prompts[self._place % len(self._prompts)]
            self._place += 1
            yield [self._scored(answer) for answer in self._sample(prompt)]

    @torch.no_grad()
    def take_weights(self) -> None:
        """Take the plain loop's weights over, for the next step's answers."""
        own = dict(self._model.named_parameters())
        for name, weight in self._loop.policy.named_parameters():
            own[name].copy_(weight)

    def _readable(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Return the tokens of as many prompts as the steps can take, those left out that are too long."""
        given = self._settings
        wanted = given.run.max_steps * given.learner.groups_per_step
        positions = min(given.rollout.max_context_tokens, read_max_positions(self._folder) or sys.maxsize)
        longest = positions - given.rollout.max_response_tokens
        found = []
        for prompt in prompts:
            tokens = self._tokens(prompt.prompt)
            if 0 < len(tokens) <= longest:
                found.append(tokens)
            if len(found) == wanted:
                break
        if not found:
            raise OperatorError(
                f"data.train = {given.data.train} has no prompt of 1 to {longest} tokens. Lower "
                "rollout.max_response_tokens, or give shorter prompts."
            )
        return found

    def _tokens(self, prompt: str | list[dict[str, Any]]) -> list[int]:
        if isinstance(prompt, str):
            return list(self._tokenizer.encode(prompt))
        if not self._tokenizer.chat_template:
            raise OperatorError(
                f"data.train = {self._settings.data.train} has chat messages, and the model has no chat template. "
                "Give prompts as text, or a model with a template."
            )
        text = self._tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _drawing(self) -> Any:
        """Return how answers are drawn: by the temperature alone, whatever the model folder says."""
        from transformers import GenerationConfig

        given = self._settings.rollout
        ends = self._model.generation_config.eos_token_id
        if ends is None:
            ends = self._tokenizer.eos_token_id
        ends = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
        return GenerationConfig(
            do_sample=True,
            temperature=given.temperature,
            top_k=0,
            top_p=1.0,
            max_new_tokens=given.max_response_tokens,
            num_return_sequences=given.group_size,
            eos_token_id=ends or None,
            pad_token_id=ends[0] if ends else 0,
        )

    @torch.no_grad()
    def _sample(self, prompt: list[int]) -> list[Answer]:
        """Return the answers of one group."""
        read = torch.tensor([prompt], device=own_device())
        written = self._model.generate(read, attention_mask=torch.ones_like(read))
        return [self._answer(prompt, row[len(prompt) :].tolist()) for row in written]

    def _answer(self, prompt: list[int], written: list[int]) -> Answer:
        end = next((place for place, token in enumerate(written) if token in self._ends), len(written) - 1)
        tokens = np.array([*prompt, *written[: end + 1]], np.int32)
        return Answer(tokens, np.arange(len(tokens)) >= len(prompt), self._reward(tokens))

    def _reward(self, tokens: np.ndarray[Any, np.dtype[np.int32]]) -> float:
        drawn = float(np.random.default_rng([self._settings.run.seed, *tokens.tolist()]).random())
        # DAPO's filter knows right and wrong answers alone.
        return float(drawn < 0.5) if self._settings.filter.dynamic_sampling else drawn

    @torch.no_grad()
    def _scored(self, answer: Answer) -> Answer:
        """Return the answer with the loop's logprobs, after comparing them with those of transformers' own pass."""
        learners = self._loop.logprobs(self._loop.policy, answer)
        logits = self._model(torch.tensor(answer.tokens[None], device=own_device(), dtype=torch.int64)).logits[0, :-1]
        own = _chosen(logits.float() / self._settings.rollout.temperature, answer)
        self.logprob_difference = max(self.logprob_difference, float((learners - own).abs().max()))
        behaviour = np.zeros(len(answer.tokens), np.float32)
        behaviour[answer.mask] = learners.cpu().numpy()
        return replace(answer, behaviour=behaviour)


def _chosen(logits: Tensor, answer: Answer) -> Tensor:
    """Return the logprobs of the tokens that the model wrote, [K]. logits: [T - 1, vocabulary]."""
    tokens = torch.tensor(answer.tokens[1:], device=logits.device, dtype=torch.int64)
    found = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    return found[torch.tensor(answer.mask[1:], device=logits.device)]
