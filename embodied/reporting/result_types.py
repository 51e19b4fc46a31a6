"""What a report relies on in the files it shows: of each key it looks at, the kind. Other keys may hold anything."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, NotRequired

from pydantic import Field, FiniteFloat, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic asks for this one below Python 3.12

Count = Annotated[int, Field(ge=0, lt=2**63)]
LARGEST = 1e100
Share = Annotated[float, Field(ge=-1e-6, le=1 + 1e-6)]  # rounding may leave the unit interval


class Measure(TypedDict):
    rate: Share
    interval: Annotated[list[Share], Field(min_length=2, max_length=2)]
    count: Count
    of: Count


class AtReset(TypedDict):
    count: Count


Figures = TypedDict(
    "Figures",
    {
        "success_once": Measure | None,
        "success_at_end": Measure | None,
        "success_at_reset": AtReset | None,
        "episodes": Count,
        "errors": Count,
        "return": FiniteFloat | None,
        "length": FiniteFloat | None,
    },
)


class HowPlayed(TypedDict):
    seed: NotRequired[int]
    temperature: NotRequired[FiniteFloat]


class Protocol(TypedDict):
    name: NotRequired[str]
    eval: NotRequired[HowPlayed]
    env: NotRequired[dict[str, Any]]


class Results(TypedDict):
    policy_version: Count
    overall: Figures
    per_task: dict[str, Figures]
    protocol: NotRequired[Protocol]
    provenance: NotRequired[dict[str, Any]]


class Host(TypedDict):
    name: str
    roles: list[str]


class Placement(TypedDict):
    hosts: list[Host]


class Info(TypedDict, total=False):
    state: str
    cause: str
    command: str
    started: str
    ended: str
    provenance: dict[str, Any]
    placement: Placement
    resumed: list[dict[str, Any]]


class Row(TypedDict):
    iteration: Count
    env_steps: Count
    policy_version: Count
    train_s: Annotated[FiniteFloat, Field(ge=0)]


def check(content: Any, shape: Any) -> None:
    """Raise ValueError with the first thing that is something else."""
    try:
        TypeAdapter(shape).validate_python(content, strict=True)
    except ValidationError as err:
        first = err.errors(include_url=False, include_input=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc'])) or 'all of it'}: {first['msg'].lower()}") from None


def check_info(info: dict[str, Any]) -> None:
    check(info, Info)
    for key in ("started", "ended"):
        if key in info:
            datetime.fromisoformat(info[key])


def check_row(row: Any) -> None:
    check(row, Row)
    if odd := [key for key, value in row.items() if type(value) not in (int, float, type(None))]:
        raise ValueError(f"{odd[0]} is no number")
    if odd := [key for key, value in row.items() if value and LARGEST < abs(value) < float("inf")]:
        raise ValueError(f"{odd[0]}={row[odd[0]]:g} is more than a chart can show")
