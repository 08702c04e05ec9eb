"""The settings by which the audit measures a step. The ledger records them, since a resumed run may have others."""

from protocol.settings.settings import Settings


def terms_of(settings: Settings) -> dict[str, int | float | str]:
    """Return the settings by name. Without a filter filter_score is empty, and the bounds are absent."""
    terms: dict[str, int | float | str] = {
        "group_size": settings.rollout.group_size,
        "groups_per_step": settings.learner.groups_per_step,
        "max_staleness": settings.learner.max_staleness,
        "endpoints": settings.rewards.describe_endpoints(),
        "filter_score": settings.filter.score if settings.filter.dynamic_sampling else "",
    }
    if settings.filter.dynamic_sampling:
        terms |= {"filter_low": settings.filter.low, "filter_high": settings.filter.high}
    return terms
