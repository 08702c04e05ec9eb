"""What a run may not change from start to start: which prompts it has, and their order. Its accounts are of those."""

from collections.abc import Sequence

from learner.data.prompt_order import USUAL_ORDER, order_name
from learner.data.prompt_set import prompts_digest, rows_by_entry
from learner.data.prompts import Prompt
from learner.ledger.ledger import Ledger
from protocol.errors import SettingsError
from protocol.settings.data import in_words
from protocol.settings.settings import Settings


def claim_prompts(ledger: Ledger, settings: Settings, train: Sequence[Prompt]) -> None:
    """Raise SettingsError when the run began with other prompts, or in another order: its accounts are of those."""
    if not train:
        return
    has_begun = ledger.meta("claim:prompts") is not None
    if ledger.claim("prompts", prompts_digest(train)) is not None:
        raise SettingsError(
            f"settings: data.train = {in_words(settings.data.train)} holds other prompts than this run began with. "
            "Put the earlier file back, or choose another run.name."
        )
    if (seed := ledger.claim("seed", str(settings.run.seed))) is not None:
        raise SettingsError(
            f"settings: run.seed = {settings.run.seed}, and this run began with {seed}, which orders its prompts. "
            f"Set run.seed to {seed}, or choose another run.name."
        )
    if has_begun and ledger.meta("claim:order") is None:
        ledger.claim("order", USUAL_ORDER)  # begun by a version that knew no other
    given = order_name(rows_by_entry(train), settings.data.weights(), settings.data.shuffle)
    if (order := ledger.claim("order", given)) is not None:
        raise SettingsError(
            f"settings: data.train's weights and data.shuffle give the order {given!r}, and this run began with "
            f"{order!r}. Put them back, or choose another run.name."
        )
