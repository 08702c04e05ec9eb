"""Settings of the reward services and of the retriever."""

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
        1.0, allow_inf_nan=False, description="Factor of the part; 0: called, recorded and shown, not in the reward."
    )
    timeout_s: Seconds = Field(60.0, description="Longest wait for one request.")
    max_concurrency: CountAboveZero = Field(64, description="Requests in flight to this endpoint from one server.")
    headers_env: dict[str, str] = Field({}, description="HTTP header -> environment variable that holds its value.")
    batch_size: CountAboveZero = Field(1, description="Samples sent in one request.")

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if name == "environment":
            raise ValueError("is the name of an environment's own reward. Give the endpoint another name.")
        return name


class RewardsSettings(Section):
    # A trajectory has at most 64 parts, the environment's included.
    endpoints: list[RewardEndpoint] = Field(
        [], max_length=63, description="Reward services; empty: the bundled one of this cluster."
    )
    combine: Literal["sum", "mean", "product", "shard"] = Field(
        "sum",
        description="How the endpoints' parts become one reward; shard: each sample is scored by one endpoint. "
        "The environment's own reward is added to it.",
    )
    credit: Literal["conversation", "turn"] = Field(
        "conversation",
        description="Place of an environment's rewards per turn. conversation: the last token; turn: the last token of "
        "its turn, for advantages of tokens (gae, reinforce_pp).",
    )
    clip: PositiveFloat | None = Field(
        None, description="Rewards are clipped to [-clip, clip] before advantages are computed; null: no limit."
    )
    normalize: bool = Field(
        False, description="Normalise rewards by their mean and standard deviation over the run so far."
    )
    overlong_buffer_tokens: Count = Field(
        0, description="Tokens at the end of an answer's budget in which a penalty rises from 0; 0: no penalty."
    )
    overlong_penalty: NonNegativeFloat = Field(1.0, description="Penalty at the end of the budget.")
    overlong_max_tokens: CountAboveZero | None = Field(
        None, description="Budget of an answer, in model tokens of a trajectory; null: rollout.max_response_tokens."
    )
    truncated: Literal["keep", "penalise", "mask"] = Field(
        "keep",
        description="Trajectories cut off by rollout.max_response_tokens, max_context_tokens or max_conversation_s. "
        "keep: trained as they are; penalise: the reward is reduced by truncated_penalty; mask: no part of the loss.",
    )
    truncated_penalty: NonNegativeFloat = Field(1.0, description="Penalty for truncated = penalise.")

    def describe_endpoints(self) -> str:
        """Return who scores, for the ledger: "math http://host/r weight 1, style http://host/s weight 0; sum"."""
        return self._describe(self.endpoints)

    def reward_source(self, environment: str) -> str:
        """Return what decides the reward: endpoints with a weight, and the environment if it is not `single_turn`.

        Two sources' rewards are not comparable.
        """
        scorers = self._describe([endpoint for endpoint in self.endpoints if endpoint.weight])
        return scorers if environment == "single_turn" else f"{scorers}; in {environment}"

    def _describe(self, endpoints: Sequence[RewardEndpoint]) -> str:
        names = [f"{endpoint.name} {endpoint.url} weight {endpoint.weight:g}" for endpoint in endpoints]
        otherwise = "the environment alone" if self.endpoints else "the service of the cluster"
        return f"{', '.join(names) or otherwise}; {self.combine}"


class RetrieverSettings(Section):
    url: ServiceUrl | None = Field(None, description="POST /retrieve address; null: each node's own retriever.")
    other_index: Literal["warn", "refuse"] = Field(
        "warn",
        description="When retrievers of nodes, or the last start's, serve different indexes. warn: log it; refuse: "
        "end the start, and reject servers that join later.",
    )
    topk: CountAboveZero = Field(3, description="Passages of one search.")
    words: Literal["plain", "search_r1"] = Field(
        "plain", description="Wording of passages and corrections; search_r1: for policies trained with Search-R1."
    )
    batch_size: CountAboveZero = Field(
        16, description="Largest number of queries in one request, from searches within 5 ms of each other."
    )
