"""Messages with pictures: their parts, their words, and what a sample of a conversation keeps."""

import pytest

from embodied.core import conversations as talk


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
    assert talk.pictures_in(SAID) == ("a.png", "video:/b.mp4", "video:/c.mp4?frames=3")
    assert not talk.pictures_in("a.png")
    assert talk.in_words(SAID[1]) == "[picture]or[picture]?" and talk.in_words(SAID[0], "") == "Look."
    assert talk.parts_of(SAID[0]) == [text("Look.")]


def test_a_video_gets_the_rule_for_its_frames_unless_its_name_has_one():
    ruled = talk.with_frames(SAID, 4, 0.5)
    assert talk.pictures_in(ruled) == ("a.png", "video:/b.mp4?frames=4&every=0.5", "video:/c.mp4?frames=3")
    assert [*map(talk.in_words, ruled)] == [*map(talk.in_words, SAID)] and talk.with_frames("b.mp4", 4, 0.5) == "b.mp4"


@pytest.mark.parametrize(
    "content",
    [None, 3, {"type": "text"}, ["a"], [{"text": "a"}], [text(3)], [text("a") | {"image": "b"}], [image(b"")]],
)
def test_a_message_of_other_content_is_recognised(content):
    assert not talk.is_content(content)
    assert talk.is_content("a") and talk.is_content([text("a"), image("b")]) and talk.is_content(())


def test_a_sample_of_a_conversation_keeps_beginnings_ends_and_pictures():
    long = "a" * talk.SAMPLE_CHARACTERS + "b" * talk.SAMPLE_CHARACTERS
    turn = {"said": ({"role": "user", "content": [image("a.png"), text(long)]},), "answer": "2", "facts": {"n": 3}}
    short = talk.shortened_turn(turn)
    picture, words = short["said"][0]["content"]
    assert picture == image("a.png") and words["text"].startswith("aaa") and words["text"].endswith("bbb")
    assert "2,000 characters left out" in words["text"] and len(words["text"]) < talk.SAMPLE_CHARACTERS + 50
    assert (short["answer"], short["facts"]) == ("2", {"n": "3"})
    assert talk.shortened_turn(turn | {"said": long})["said"] == words["text"]
