"""Settings of searches."""

from pydantic import Field

from protocol.settings.section import CountAboveZero, Section, ServiceUrl


class RetrieverSettings(Section):
    url: ServiceUrl | None = Field(None, description="POST /retrieve address; null: each node's own retriever.")
    topk: CountAboveZero = Field(3, description="Passages of one search.")
