"""`sluice serve-reward`: a reward service for a bundled scorer or a user's own Python function."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from protocol.errors import OperatorError
from protocol.http.bearer import read_token
from protocol.http.listen import LOOPBACK, add_listen_options, bind, positive
from protocol.http.service import run_service, serve_app
from rewards.answer_format import DEFAULT_TAGS
from rewards.bundled import SCORERS, ScorerOptions, scorer_named
from rewards.calling import LABEL_NAMES
from rewards.function_process import load_scorer
from rewards.sample import Scorer
from rewards.service import RewardService


def main(arguments: Sequence[str]) -> int:
    return run_service(_parser(), arguments, _serve)


def _serve(arguments: argparse.Namespace) -> None:
    token = read_token(arguments.token_file) if arguments.token_file else None
    if arguments.unsafe_local_exec and token is None and arguments.host not in LOOPBACK:
        raise OperatorError(
            f"rewards: with --unsafe-local-exec on --host {arguments.host} other machines can run code here, so a "
            "token is required. Give --token-file, or listen on 127.0.0.1."
        )
    listener = bind("rewards", arguments.host, arguments.port)
    scorer, name = _choose_scorer(arguments)
    serve_app(RewardService(scorer, name).app(), listener, token, f"rewards: {name}")


def _choose_scorer(arguments: argparse.Namespace) -> tuple[Scorer, str]:
    if arguments.function:
        reads = arguments.solution_str if arguments.completions == "auto" else arguments.completions
        scorer = load_scorer(arguments.function, arguments.workers, reads, arguments.label)
        return scorer, Path(arguments.function).name
    given = {
        "--label": arguments.label,
        "--completions": arguments.completions,
        "--solution-str": arguments.solution_str,
    }
    for option, value in given.items():
        if value not in ("", "auto"):
            raise OperatorError(f"rewards: {option} {value} belongs to --function. Leave it out with --scorer.")
    options = ScorerOptions(
        arguments.workers,
        arguments.tags,
        arguments.model,
        arguments.model_dtype,
        arguments.model_device,
        arguments.batch_tokens,
        arguments.test_timeout_s,
        arguments.unsafe_local_exec,
    )
    return scorer_named(arguments.scorer, options), arguments.scorer


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sluice serve-reward", description=__doc__)
    choice = parser.add_mutually_exclusive_group(required=True)
    choice.add_argument("--scorer", help=f"a bundled scorer: {', '.join(sorted(SCORERS))}")
    choice.add_argument(
        "--function",
        metavar="FILE.py[:NAME]",
        help="a reward function of OpenRLHF, verl, Search-R1, TRL or score(sample)",
    )
    parser.add_argument(
        "--solution-str",
        choices=["auto", "response", "sequence"],
        default="auto",
        help="what a verl function gets: the response, or prompt and response as in Search-R1; auto: by a known answer",
    )
    parser.add_argument(
        "--completions",
        choices=["auto", "text", "messages"],
        default="auto",
        help="what a TRL function gets: texts, or messages as with conversational rows; auto: by known answers",
    )
    parser.add_argument("--label", default="", help=f"TRL parameter for the label (default: {', '.join(LABEL_NAMES)})")
    parser.add_argument(
        "--workers",
        type=positive,
        default=1,
        help="processes of a sync function or of math_answer; code_tests: new programs at a time (1: two per core)",
    )
    parser.add_argument("--tags", default=DEFAULT_TAGS, help="format: tags of a response, with * after optional ones")
    parser.add_argument("--model", help="reward_model: folder of the model, or its name on the Hugging Face hub")
    parser.add_argument(
        "--model-dtype",
        choices=["float32", "bfloat16", "float16"],
        default="float32",
        help="reward_model: dtype of the weights",
    )
    parser.add_argument("--model-device", default="", help="reward_model: such as cpu or cuda:1 (default: first GPU)")
    parser.add_argument(
        "--batch-tokens", type=positive, default=16_384, help="reward_model: most tokens of one forward pass"
    )
    parser.add_argument(
        "--test-timeout-s", type=positive, default=10, help="code_tests: processor time of one test in seconds"
    )
    parser.add_argument(
        "--unsafe-local-exec",
        action="store_true",
        help="code_tests: run programs without isolation, with this service's files, network and rights",
    )
    add_listen_options(parser, 8001)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
