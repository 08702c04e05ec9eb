"""Settings of searches."""

from typing import Literal

from pydantic import Field

from protocol.settings.section import CountAboveZero, Section, ServiceUrl


class RetrieverSettings(Section):
    url: ServiceUrl | None = Field(None, description="POST /retrieve address; null: each node's own retriever.")
    other_index: Literal["warn", "refuse"] = Field(
        "warn",
        description="When nodes' own retrievers hold different indexes: say so; or end the start, and leave a "
        "server out that comes later.",
    )
    topk: CountAboveZero = Field(3, description="Passages of one search.")
    batch_size: CountAboveZero = Field(
        16, description="Most queries in one request: of searches that a server begins within 5 ms; 1: each alone."
    )
