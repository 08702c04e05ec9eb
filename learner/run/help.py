"""Text of `sluice run --help`: the usual settings first, one section, or all of them."""

import re
import textwrap
from collections.abc import Sequence

from protocol.errors import SettingsError
from protocol.settings.did_you_mean import likeliest_value
from protocol.settings.loader import settings_help
from protocol.settings.section import Section
from protocol.settings.settings import Settings

ALL = "all"
# Every section; objective is a setting without one.
SECTIONS = [name for name in Settings.model_fields if name != "objective"]
USUAL = (
    "run.name",
    "run.max_steps",
    "policy.model",
    "data.train",
    "data.eval",
    "rewards.endpoints",
    "rollout.environment",
    "rollout.group_size",
    "rollout.max_response_tokens",
    "learner.groups_per_step",
    "learner.num_ranks",
    "learner.lr",
)
_WIDTH = 80
_LEFT = 32


def help_text(section: str) -> str:
    """Return the settings of one section, such as learner or policy.lora, of `all`, or the usual ones for "".

    Raises: SettingsError for another name.
    """
    if section == ALL:
        return settings_help().strip()
    if not section:
        return "\n".join(
            [
                "The twelve settings that most runs set:",
                *(line for name in USUAL for line in _describe(name)),
                "",
                *textwrap.wrap(
                    f"sluice run --help SECTION explains one of {', '.join(SECTIONS)}; "
                    f"sluice run --help {ALL} explains every setting.",
                    _WIDTH,
                ),
            ]
        )
    groups = re.split(r"\n\n(?=\S+ options:\n)", settings_help().strip())
    if shown := [group for group in groups if re.match(rf"{re.escape(section)}[ .]", group)]:
        return "\n\n".join(shown)
    expected = f"expected one of {', '.join([ALL, *SECTIONS])}"
    raise SettingsError(f"settings: --help {section}: {expected}.{likeliest_value(section, expected)}")


def _describe(name: str) -> Sequence[str]:
    section, key = name.split(".")
    kind = Settings.model_fields[section].annotation
    assert isinstance(kind, type)
    assert issubclass(kind, Section)
    about = textwrap.wrap(kind.model_fields[key].description or "", _WIDTH - _LEFT)
    return [f"{f'  --{name}' if place == 0 else '':<{_LEFT}}{line}" for place, line in enumerate(about)]
