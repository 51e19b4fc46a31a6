"""Values of env options: how each may be written, and what is refused. Free of torch and simulators."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from embodied.core.errors import nearest

EXTERNAL = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def a_name_or_names(value: Any) -> Any:
    names = value if isinstance(value, list | tuple) else [value]
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError("should be the name of a task, or a list of names")
    return value


def height_and_width(value: Any) -> Any:
    return (value, value) if isinstance(value, int) else value


REWARDS = ("own", "success", "difference")


def known_reward(name: str) -> str:
    if name not in REWARDS and not EXTERNAL.fullmatch(name):
        mode = f"; did you mean env.reward_mode={name}?" if name.endswith(("dense", "sparse")) else ""
        raise ValueError(
            f"env.reward={name!r} is unknown (known: {', '.join(REWARDS)}, my_pkg.my_module:my_reward)"
            f"{mode or nearest(name, REWARDS)}"
        )
    return name


Side = Annotated[int, Field(ge=8, le=2048)]
ImageSize = Annotated[tuple[Side, Side], BeforeValidator(height_and_width)]
SIZE_HELP = "Height and width of these images in pixels; one number for both."


def not_empty(region: tuple[float, float, float, float]) -> tuple[float, float, float, float]:
    left, top, right, bottom = region
    if left >= right or top >= bottom:
        raise ValueError("is empty: left and top come first, then right and bottom; try [0.2, 0, 0.8, 0.8]")
    return region


Share = Annotated[float, Field(ge=0, le=1)]
Region = Annotated[tuple[Share, Share, Share, Share], AfterValidator(not_empty)]
Tasks = Annotated[str | tuple[str, ...], BeforeValidator(a_name_or_names)]
Modules = Annotated[tuple[str, ...], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]
