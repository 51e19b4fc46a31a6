"""The profiles of published workloads: every number has a source, and the planner finds the published winners."""

import json
from pathlib import Path

import pytest

PROFILES = Path(__file__).parents[2] / "assets/profiles"
FILES = sorted(PROFILES.glob("published_*.json"))


def numbers(content, path=()):
    """Dotted paths of everything that is a number; components by their name."""
    if isinstance(content, dict):
        for key, value in content.items():
            yield from numbers(value, (*path, key))
    elif isinstance(content, list):
        for i, value in enumerate(content):
            yield from numbers(value, (*path, value["name"] if isinstance(value, dict) and "name" in value else str(i)))
    elif not isinstance(content, str):
        yield ".".join(path)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_number_has_a_source(path):
    content = json.loads(path.read_text())
    sources = content.pop("sources")
    content.pop("made")
    found = list(numbers(content))
    assert len(found) > 30
    bare = [number for number in found if not any(number == s or number.startswith(s + ".") for s in sources)]
    assert not bare
    idle = [s for s in sources if not any(number == s or number.startswith(s + ".") for number in found)]
    assert not idle
