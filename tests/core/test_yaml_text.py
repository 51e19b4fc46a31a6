"""Values survive being written as YAML and read again, and texts that would do more are refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from yaml import YAMLError

from embodied.core.yaml_text import read_yaml, write_yaml, yaml_problem

WORDS = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=8)
ODD_WORDS = st.sampled_from(
    ["null", "True", "no", "1e-4", "1_0", ".5", "0x1", "~", "", "a: b", "- a", "2024-01-01", "#"]
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | WORDS | ODD_WORDS
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS | ODD_WORDS, inner, max_size=3)
)


@given(VALUES)
def test_a_written_value_is_one_line_that_is_read_as_the_same_value(value):
    text = write_yaml(value)
    assert "\n" not in text
    again = read_yaml(text)
    assert again == value and repr(again) == repr(value), "1 is not 1.0 and not true"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("1e-4", 1e-4), ("1E3", 1000.0), (".5", 0.5), ("2", 2), ("1_000.5", 1000.5), ("null", None), ("~", None)),
        *((word, word) for word in ("off", "yes", "010", "0x1", "1:30", "2024-01-01")),
        ("1: true", {"1": True}),
    ],
)
def test_numbers_are_read_as_people_write_them_and_words_stay_words(text, value):
    assert read_yaml(text) == value and type(read_yaml(text)) is type(value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("!!python/object/apply:os.getcwd []", "line 1: could not determine a constructor"),
        ("a: 1\nb: !!set {c}", "line 2: could not determine a constructor"),
        ("a: &x 1\nb: *x", "line 2: aliases"),
        ("a: 1\na: 2", "line 2: 'a' is there twice"),
        ("? [a]\n: 1", "line 1: a key must be a plain word"),
        ("a:\n - [", "line 2"),
        ("[" * 3000 + "]" * 3000, "nested too deeply"),
    ],
)
def test_a_yaml_text_that_would_do_more_than_hold_values_is_refused_with_its_line(text, reason):
    with pytest.raises(YAMLError) as caught:
        read_yaml(text)
    assert reason in yaml_problem(caught.value)


def test_a_changed_value_is_not_read_again():
    read_yaml("a: [1]")["a"].append(2)
    assert read_yaml("a: [1]") == {"a": [1]}
