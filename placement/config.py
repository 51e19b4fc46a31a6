"""The `placement` key: a mode, or a map from roles to devices. `make_plan` decides what it means on this machine."""

from __future__ import annotations

import difflib
from typing import Annotated, Any

from pydantic import BeforeValidator

from embodied.placement.grammar import MAP_EXAMPLE, MODES, PlacementError, parse_map


def _readable(value: Any) -> str | dict[str, Any]:
    if isinstance(value, dict):
        try:
            parse_map(value, more=True)
        except PlacementError as err:
            raise PlacementError(f"{err}; try placement='{MAP_EXAMPLE}'") from None
        return value
    if value in MODES:
        return value
    close = difflib.get_close_matches(str(value), MODES, n=1)
    meant = close[0] if close else "auto"
    raise ValueError(
        f"neither a mode nor a map; try placement={meant}. Modes: {', '.join(MODES)}; a map: {MAP_EXAMPLE}"
    )


PlacementConfig = Annotated[str | dict[str, str | dict[str, str]], BeforeValidator(_readable)]
