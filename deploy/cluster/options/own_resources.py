"""`--resources`: names of an operator's own for what a node has, as Ray is told of them."""

import json

from protocol.errors import SettingsError
from protocol.settings.placement import MOST_OF_A_RESOURCE, is_name_of_ray


def read_resources(text: str) -> str:
    """Return the JSON object in one form, however it was typed: another form would be another option.

    Raises: SettingsError where it is none of what a node may have.
    """
    try:
        found = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        found = None
    if isinstance(found, dict) and (own := sorted(filter(is_name_of_ray, found))):
        raise SettingsError(
            f"start_cluster: --resources names {', '.join(own)}, which Ray counts by itself. Use names of your own; "
            "--num-cpus and --num-gpus say how many of those Ray counts."
        )
    if not isinstance(found, dict) or not all(
        type(value) in (int, float) and 0 < value <= MOST_OF_A_RESOURCE and value == int(value)
        for value in found.values()
    ):
        raise SettingsError(
            f"start_cluster: --resources {text} is no JSON object of whole numbers above 0 "
            f"and up to {MOST_OF_A_RESOURCE:g}. "
            """Give one such as '{"v100": 8}'."""
        )
    if any(not name or "," in name for name in found):  # Ray tells names apart by commas
        raise SettingsError(f"start_cluster: --resources {text} has a name that is empty or has a comma. Use another.")
    return json.dumps({name: int(found[name]) for name in sorted(found)})
