"""Settings of the reward services and of how their answers become one reward."""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, field_validator

from protocol.settings.section import Count, CountAboveZero, Seconds, Section, ServiceUrl


class RewardEndpoint(Section):
    name: str = Field(
        pattern=r"^[A-Za-z0-9_.-]+$", max_length=200, description="Name of this reward's part on a trajectory."
    )
    url: ServiceUrl = Field(description="POST address, used exactly as given.")
    weight: float = Field(
        1.0,
        allow_inf_nan=False,
        description="Factor of this part when parts are combined; 0: called, recorded and shown, not in the reward.",
    )
    timeout_s: Seconds = Field(60.0, description="Longest wait for one attempt.")
    max_concurrency: CountAboveZero = Field(64, description="Requests in flight to this endpoint from one server.")
    headers_env: dict[str, str] = Field({}, description="HTTP header -> environment variable that holds its value.")
    batch_size: CountAboveZero = Field(1, description="Samples sent in one request.")

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if name == "environment":
            raise ValueError("is the part that environments' own rewards have. Give the endpoint another name.")
        return name


class RewardsSettings(Section):
    # A trajectory has room for 64 parts, and the environment's own is one of them.
    endpoints: list[RewardEndpoint] = Field(
        [], max_length=63, description="Reward services; empty: the bundled one of this cluster."
    )
    combine: Literal["sum", "mean", "product", "shard"] = Field(
        "sum", description="How the endpoints' parts become one reward."
    )
    credit: Literal["conversation", "turn"] = Field(
        "conversation",
        description="Where rewards stand that an environment gives turn by turn: all at the last token, or each at the "
        "last token of its turn. turn: with advantages of tokens (gae, reinforce_pp).",
    )
    clip: PositiveFloat | None = Field(
        None, description="Rewards are cut to [-clip, clip] before advantages are computed; null: not cut."
    )
    normalize: bool = Field(
        False, description="Rewards become distances from their mean over the run so far, in standard deviations."
    )
    overlong_buffer_tokens: Count = Field(
        0, description="Last tokens of an answer's budget, over which a penalty rises from 0; 0: no penalty."
    )
    overlong_penalty: NonNegativeFloat = Field(1.0, description="That penalty at the end of the budget.")
    overlong_max_tokens: CountAboveZero | None = Field(
        None, description="That budget, in model tokens of a trajectory; null: rollout.max_response_tokens."
    )
    truncated: Literal["keep", "penalise", "mask"] = Field(
        "keep",
        description="Trajectories cut by rollout.max_response_tokens, max_context_tokens or max_conversation_s: kept; "
        "trained with truncated_penalty taken off their reward; or left out of the loss.",
    )
    truncated_penalty: NonNegativeFloat = Field(1.0, description="truncated = penalise: what is taken off.")

    def describe_endpoints(self) -> str:
        """Return who scores, for the ledger: "math http://host/r weight 1, style http://host/s weight 0; sum"."""
        return self._describe(self.endpoints)

    def reward_source(self) -> str:
        """Return the part of `describe_endpoints` that decides the reward; two sources' rewards are not comparable."""
        return self._describe([endpoint for endpoint in self.endpoints if endpoint.weight])

    def _describe(self, endpoints: Sequence[RewardEndpoint]) -> str:
        names = [f"{endpoint.name} {endpoint.url} weight {endpoint.weight:g}" for endpoint in endpoints]
        return f"{', '.join(names) or 'the service of the cluster'}; {self.combine}"
