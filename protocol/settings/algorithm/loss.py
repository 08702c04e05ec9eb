"""Settings of how the losses of tokens become one number."""

from typing import Literal

from pydantic import Field

from protocol.settings.section import CountAboveZero, Section


class LossSettings(Section):
    aggregate: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_sum_norm"] = Field(
        "token_mean",
        description="token_mean: each model token counts the same; seq_mean_..: each trajectory does, with its tokens' "
        "mean or sum; seq_sum_norm: that sum over loss.constant.",
    )
    constant: CountAboveZero | None = Field(
        None, description="Divisor of seq_sum_norm; null: rollout.max_response_tokens."
    )
