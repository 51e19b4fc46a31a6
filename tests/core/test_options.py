"""Options models: values that overflow, rules between options, and packages that are missing."""

from typing import ClassVar

import pytest
from pydantic import ValidationError

from embodied.core.options import Strict, never_with, only_with


class Base(Strict):
    rules: ClassVar = (only_with("cap", {"clip": ("tis", "aipo")}),)
    section: ClassVar[str] = "algo."

    clip: str = "two_sided"
    cap: float = 2.0


class Options(Base):
    rules: ClassVar = (never_with("rate low", {"name": bool, "clip": "tis"}, "it scales twice; leave one of them out"),)

    rate: float | None = None
    low: int = 0
    wait_s: float = 1.0
    sizes: tuple[int, ...] = (1,)
    name: str = ""
    flag: bool | int = 0


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"rate": 1e308}, "between -1e+30 and 1e+30"),
        ({"low": -(10**30)}, "at most 64 bits"),
        ({"rate": 10**400}, "at most 64 bits"),
        ({"rate": float("nan")}, "finite number"),
        ({"wait_s": 1e9}, "at most 2000000 seconds"),
        ({"low": True}, "should be a number"),
        ({"sizes": [1, True]}, "true is not a number"),
        ({"name": "a\0b"}, "holds a NUL character"),
        ({"lowest": 1}, "Extra inputs"),
        ({"cap": 3}, "algo.cap=3 has no effect with algo.clip=two_sided; leave it out, or set algo.clip=tis"),
        (
            {"rate": 0.5, "low": 1, "name": "a", "clip": "tis"},
            "algo.rate=0.5 and algo.low=1 do not go with algo.name=a and algo.clip=tis: it scales twice; leave one",
        ),
    ],
)
def test_an_unusable_option_is_refused(values, reason):
    with pytest.raises(ValidationError) as caught:
        Options(**values)
    assert reason in str(caught.value)


def test_options_that_keep_the_rules_are_taken():
    assert Options(cap=2).cap == 2, "the default is no setting"
    assert Options(cap=3, clip="aipo").cap == 3 and Options(rate=1, low=1, clip="tis").low == 1
    assert Options(flag=True).flag is True
