"""The `placement` key: a mode, or a map from roles to devices. `make_plan` decides what it means on this machine."""

from __future__ import annotations

import difflib
from typing import Annotated, Any

from pydantic import BeforeValidator

from embodied.placement.grammar import MAP_EXAMPLE, MODES, parse_map


def _readable(value: Any) -> str | dict[str, str]:
    if isinstance(value, dict):
        parse_map(value)
        return value
    if value in MODES:
        return value
    close = difflib.get_close_matches(str(value), MODES, n=1)
    meant = f"did you mean {close[0]!r}? " if close else ""
    raise ValueError(f"neither a mode nor a map. {meant}Modes: {', '.join(MODES)}; a map: {MAP_EXAMPLE}")


PlacementConfig = Annotated[str | dict[str, str], BeforeValidator(_readable)]
