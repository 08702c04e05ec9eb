"""Settings of searches."""

from pydantic import (
    Field,
    PositiveInt,
)

from protocol.settings.section import Section, ServiceUrl


class RetrieverSettings(Section):
    url: ServiceUrl | None = Field(None, description="POST /retrieve address; null: each node's own retriever.")
    topk: PositiveInt = Field(3, description="Passages of one search.")
