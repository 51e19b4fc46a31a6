"""Messages with pictures: their parts, their words, and what a sample of a conversation keeps."""

import pytest

from embodied.core.conversations import (
    SAMPLE_CHARACTERS,
    in_words,
    is_content,
    parts_of,
    pictures_in,
    shortened_turn,
    with_frames,
)


def text(words):
    return {"type": "text", "text": words}


def image(name):
    return {"type": "image", "image": name}


SAID = (
    {"role": "system", "content": "Look."},
    {"role": "user", "content": [image("a.png"), text("or"), image("video:/b.mp4"), text("?")]},
    {"role": "user", "content": [image("video:/c.mp4?frames=3")]},
)


def test_a_conversation_has_its_pictures_in_order_and_words_in_their_place():
    assert pictures_in(SAID) == ("a.png", "video:/b.mp4", "video:/c.mp4?frames=3") and pictures_in("a.png") == ()
    assert in_words(SAID[1]) == "[picture]or[picture]?" and in_words(SAID[0], "") == "Look."
    assert parts_of(SAID[0]) == [text("Look.")]


def test_a_video_gets_the_rule_for_its_frames_unless_its_name_has_one():
    ruled = with_frames(SAID, 4, 0.5)
    assert pictures_in(ruled) == ("a.png", "video:/b.mp4?frames=4&every=0.5", "video:/c.mp4?frames=3")
    assert [*map(in_words, ruled)] == [*map(in_words, SAID)] and with_frames("b.mp4", 4, 0.5) == "b.mp4"


@pytest.mark.parametrize(
    "content",
    [None, 3, {"type": "text"}, ["a"], [{"text": "a"}], [text(3)], [text("a") | {"image": "b"}], [image(b"")]],
)
def test_a_message_of_other_content_is_recognised(content):
    assert not is_content(content)
    assert is_content("a") and is_content([text("a"), image("b")]) and is_content(())


def test_a_sample_of_a_conversation_keeps_beginnings_ends_and_pictures():
    long = "a" * SAMPLE_CHARACTERS + "b" * SAMPLE_CHARACTERS
    turn = {"said": ({"role": "user", "content": [image("a.png"), text(long)]},), "answer": "2", "facts": {"n": 3}}
    short = shortened_turn(turn)
    picture, words = short["said"][0]["content"]
    assert picture == image("a.png") and words["text"].startswith("aaa") and words["text"].endswith("bbb")
    assert "2,000 characters left out" in words["text"] and len(words["text"]) < SAMPLE_CHARACTERS + 50
    assert (short["answer"], short["facts"]) == ("2", {"n": "3"})
    assert shortened_turn(turn | {"said": long})["said"] == words["text"]
