"""The settings by which the audit measures a step. The ledger records them, since a resumed run may have others."""

from protocol.settings.settings import Settings


def terms_of(settings: Settings) -> dict[str, int | float | str]:
    """Return the settings by name."""
    return {
        "group_size": settings.rollout.group_size,
        "groups_per_step": settings.learner.groups_per_step,
        "max_staleness": settings.learner.max_staleness,
        "endpoints": settings.rewards.describe_endpoints(),
    }
