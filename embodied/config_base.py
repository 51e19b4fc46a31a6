"""The base of every options model: frozen, no unknown keys, no NaN or infinity. Free of torch, so that `--help` stays fast."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)
