"""A model that writes answers into the terminal, in this process. For `sluice chat` alone."""

import argparse
import itertools
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from typing import Literal

from protocol.errors import NeighbourError, OperatorError
from protocol.one_line import one_line
from rollout.engine.start import ends_of, vllm_environment


class Speaker:
    """One model, loaded."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Load the model; takes 20 s or more. Raises: OperatorError with the reason when it cannot be served."""
        import torch
        from transformers import AutoTokenizer

        self._options = options
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(options.model, trust_remote_code=options.trust_remote_code)
        except (OSError, ValueError) as error:
            raise OperatorError(
                f"{options.model} has no tokenizer that can be loaded: {one_line(error, 300)}"
            ) from error
        on_cpus = not torch.cuda.is_available()
        # In one process: Ctrl-C would also end the engine's own.
        environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
        for name, value in (vllm_environment(options.model, on_cpus=on_cpus) | environment).items():
            os.environ.setdefault(name, value)
        warnings.simplefilter("ignore")
        print(f"Loading {options.model} ..", file=sys.stderr)
        from vllm import EngineArgs, LLMEngine

        args = EngineArgs(
            model=options.model,
            trust_remote_code=options.trust_remote_code,
            max_model_len=-1,  # as long as the cache allows
            enforce_eager=on_cpus,
            disable_log_stats=True,
            use_tqdm_on_load=False,
            **({"dtype": "float32"} if on_cpus else {}),
        )
        try:
            self._engine = LLMEngine.from_engine_args(args)
        except (TypeError, ValueError, RuntimeError) as error:
            raise OperatorError(f"vLLM cannot serve {options.model}: {one_line(error, 2000)}") from error
        self.end_tokens = ends_of(self._engine)
        self._numbers = itertools.count()

    def write(self, prompt: Sequence[int], *, keep_control_tokens: bool) -> tuple[str, Literal["stop", "length"]]:
        """Print an answer to the prompt's tokens as it comes. Returns its text and the reason of its end.

        Raises: KeyboardInterrupt after Ctrl-C, NeighbourError for a prompt that is longer than the model's context.
        """
        from vllm import SamplingParams, TokensPrompt
        from vllm.exceptions import VLLMError
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            temperature=self._options.temperature,
            max_tokens=self._options.max_tokens,
            skip_special_tokens=not keep_control_tokens,
            output_kind=RequestOutputKind.DELTA,
        )
        name, text, finish = str(next(self._numbers)), "", None
        # A step that Ctrl-C interrupts would leave a broken engine.
        stops: list[int] = []
        before = signal.signal(signal.SIGINT, lambda number, _: stops.append(number))
        try:
            self._engine.add_request(name, TokensPrompt(prompt_token_ids=[*prompt]), sampling)
            while self._engine.has_unfinished_requests() and not stops:
                for output in self._engine.step():
                    piece = output.outputs[0].text
                    text, finish = text + piece, output.outputs[0].finish_reason
                    print(piece, end="", flush=True)
        except VLLMError as error:
            raise NeighbourError("engine", one_line(error, 500)) from error
        finally:
            signal.signal(signal.SIGINT, before)
        if stops:
            self._engine.abort_request([name])
            raise KeyboardInterrupt
        print(" (cut at its limit of tokens)" if finish == "length" else "", flush=True)
        return text, "length" if finish == "length" else "stop"
