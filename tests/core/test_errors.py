"""Texts of errors: printable, without addresses of objects, and with the option that they are about."""

import pytest

from embodied.core.errors import CheckpointError, EmbodiedError, in_a_line, naming, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [("plain\tline\n", "plain\tline\n"), ("\udcff", "\\udcff"), ("\x1b[2J\r", "\\x1b[2J\\r"), ("é\x85", "é\\x85")],
)
def test_unprintable_characters_are_shown_as_escapes(text, shown):
    assert printable(text) == shown == str(EmbodiedError(text))


def test_an_error_names_no_address_of_an_object_in_memory():
    assert str(EmbodiedError(f"no reward of {object()}")) == "no reward of <object object>"
    assert in_a_line(TypeError(repr(printable))) == "TypeError: <function printable>"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("/tmp: no policy in it", "checkpoint=/tmp: no policy in it"),
        ("policy.dtype=x: unknown", "policy.dtype=x: unknown"),
        ("there is none; set checkpoint=random", "there is none; set checkpoint=random"),
    ],
)
def test_an_option_is_put_before_errors_that_name_none(text, named):
    with pytest.raises(CheckpointError) as caught, naming("checkpoint"):
        raise CheckpointError(text)
    assert str(caught.value) == named
