"""Models that see: pictures named in a conversation are read by our engine and learner as transformers reads them."""

import copy
import threading

import numpy as np
import pytest
import torch
from tiny_language import SEES, apart, build
from tiny_sight import publish
from written_videos import write_video

from embodied.core.errors import CheckpointError, ConfigError
from embodied.core.pictures import PictureError, data_url, drawing, load_picture, load_video, video
from embodied.core.types import SamplingRule
from embodied.learners.model import recompute
from embodied.policies import load_policy
from embodied.policies.language import sight
from embodied.policies.language.engine import Request, make_engine
from embodied.policies.language.folder import blocks_of
from embodied.policies.language.sight import SIGHTS, Sight

ONE, OTHER, WIDE = drawing("add", 1, 48), drawing("add", 2, 48), drawing("count", 3, 64)


@pytest.fixture(scope="module")
def fresh():
    return build(SEES, preset="tiny_vl", max_tokens=6, max_running=16)


@pytest.fixture(scope="module", params=["fresh", *SIGHTS])
def policy(request, fresh, tmp_path_factory):
    options = {"max_tokens": 6, "max_running": 16}
    if request.param == "fresh":
        return fresh
    folder = publish(tmp_path_factory.mktemp(request.param) / "model", request.param)
    return build(SEES, pretrained=str(folder), **options)


def said(*pictures, text="sum: ", role="user"):
    parts = [*({"type": "image", "image": each} for each in pictures), {"type": "text", "text": text}]
    return ({"role": role, "content": parts},)


def conversations(policy, asked=((ONE,), (OTHER,), (WIDE, ONE), ())):
    """Two answers of our engine to each of these prompts, as the learner gets them, and their log-probs there."""
    engine, found = make_engine(policy.config, policy), {}
    engine.begin(0, 3, "train", SamplingRule())
    prompts = [policy.tokenizer.encode(said(*pictures), first=True) for pictures in asked]
    for group, pictures in enumerate(asked):
        for number in (0, 1):
            key = group, number
            engine.add(Request(key, prompts[group], 6, 10 * group + number, pictures=pictures))
    while engine.running:
        found |= {answer.key: answer for answer in engine.step()}
    streams = [np.array([*prompts[group], *found[group, number].tokens]) for group, number in sorted(found)]
    mask = [np.arange(len(each)) >= len(prompts[n // 2]) for n, each in enumerate(streams)]
    inputs = {
        "actions": np.concatenate(streams)[:, None, None].astype(np.int32),
        "mask": np.concatenate(mask)[:, None],
        "lengths": np.array([len(each) for each in streams]),
        "groups": np.arange(len(streams)) // 2,
        "pictures": [name for pictures in asked for name in 2 * pictures],
    }
    return inputs, np.concatenate([found[key].logprobs for key in sorted(found)]), engine


def scores(policy, inputs):
    with torch.no_grad():
        return policy(inputs).logprobs.ravel().numpy()[inputs["mask"].ravel()]


def by_transformers(policy, inputs):
    """Log-probs of the answers by the model's own forward pass over each conversation, pixels and all."""
    place, names, found = policy.model.config.image_token_id, iter(inputs["pictures"]), []
    lengths = np.cumsum(inputs["lengths"])[:-1]
    for stream, mask in zip(np.split(inputs["actions"].ravel(), lengths), np.split(inputs["mask"].ravel(), lengths)):
        ids = torch.from_numpy(np.where(stream < 0, place, stream).astype(np.int64))[None]
        shown = [next(names) for _ in range((stream == -1).sum())]
        given = dict(policy.sight.processor(images=[[*map(load_picture, shown)]], return_tensors="pt")) if shown else {}
        if policy.sight.two_axes:
            given |= {"mm_token_type_ids": (ids == place).int()} if shown else {}
        with torch.no_grad():
            likely = policy.model(input_ids=ids, use_cache=False, **given).logits[0].log_softmax(-1)
        at = np.flatnonzero(mask)
        found.append(likely[at - 1, ids[0, at]].numpy())
    return np.concatenate(found)


def test_engine_and_learner_score_pictures_as_transformers_does_and_groups_share_them(policy):
    inputs, written, engine = conversations(policy)
    assert np.ptp(written) > 0.1  # or nothing would be compared
    theirs = by_transformers(policy, inputs)
    assert np.abs(written - theirs).max() < 1e-5
    assert np.abs(scores(policy, inputs) - theirs).max() < 1e-5
    assert np.abs(scores(policy, apart(inputs)) - theirs).max() < 1e-5
    assert engine.totals["copied"] == engine.totals["prefilled"] > 0
    exchanged = inputs | {"pictures": [ONE, OTHER, *inputs["pictures"][2:]]}  # within a group: not one prompt any more
    assert np.abs(scores(policy, exchanged) - by_transformers(policy, exchanged)).max() < 1e-5
    assert np.abs(scores(policy, exchanged) - theirs).max() > 1e-3


def patches_of_two_frames(frames, size, processor):
    """Qwen's format, written down once more: [moments, two frames, colours, rows, columns] as rows of patches."""
    mean, std = (np.array(each, np.float32) for each in (processor.image_mean, processor.image_std))
    numbers = ((np.concatenate([frames, frames[-1:]]) / np.float32(255) - mean) / std).transpose(0, 3, 1, 2)
    _, _, height, width = numbers.shape
    grid = len(numbers) // 2, height // size, width // size
    cut = numbers.reshape(grid[0], 2, 3, grid[1] // 2, 2, size, grid[2] // 2, 2, size)
    return torch.from_numpy(cut.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(np.prod(grid), -1).copy()), grid


@pytest.mark.parametrize("policy", ["qwen2_5_vl", "idefics3", "smolvlm"], indirect=True)
def test_frames_of_a_video_are_scored_as_transformers_scores_them(policy, tmp_path):
    """Between the moments of this one are less than two positions, so both rules for the text after it agree."""
    frames = np.random.default_rng(0).integers(0, 256, (10, 32, 48, 3), np.uint8)
    clip = video(write_video(tmp_path / "a.mp4", frames, 20), 5)
    inputs, written, _ = conversations(policy, ((clip,), (video(tmp_path / "a.mp4", 9),)))
    assert np.abs(scores(policy, inputs) - written).max() < 1e-5
    count = int(inputs["lengths"][0])
    stream, mask = inputs["actions"].ravel()[:count], inputs["mask"].ravel()[:count]
    chosen = frames[[0, 2, 4, 6, 8]]
    kind = policy.model.config
    if policy.sight.two_axes:
        ids = torch.from_numpy(np.where(stream < 0, kind.video_token_id, stream).astype(np.int64))[None]
        pixels, grid = patches_of_two_frames(chosen, 8, policy.sight.processor)
        given = {"pixel_values_videos": pixels, "video_grid_thw": torch.tensor([grid])}
        given |= {"second_per_grid_ts": [2 / 10], "mm_token_type_ids": 2 * (stream < 0).astype(np.int32)[None]}
        given["mm_token_type_ids"] = torch.from_numpy(given["mm_token_type_ids"])
    else:
        ids = torch.from_numpy(np.where(stream < 0, kind.image_token_id, stream).astype(np.int64))[None]
        given = policy.sight.processor(images=[[*chosen]], do_image_splitting=False, return_tensors="pt")
    with torch.no_grad():
        likely = policy.model(input_ids=ids, use_cache=False, **given).logits[0].log_softmax(-1)
    at = np.flatnonzero(mask)
    theirs = likely[at - 1, ids[0, at]].numpy()
    assert np.abs(written[: len(at)] - theirs).max() < 1e-5
    told = policy.tokenizer.decode([token for token in stream if token >= 0])
    assert ("series of five frames from a 0:00:00 [H:MM:SS] video.\n\nFrame from 00:00:" in told) == (
        kind.model_type == "smolvlm"
    )


def test_later_moments_of_a_video_have_later_positions_and_so_has_the_text_behind_it(fresh, tmp_path):
    clip = video(write_video(tmp_path / "a.mp4", np.zeros((5, 32, 32, 3), np.uint8), 4))
    assert np.array_equal(load_video(clip).seconds, [0, 0.25, 0.5, 0.75, 1.0])
    tokens = np.array([5, *fresh.sight.read(clip).tokens, 7, 8])
    # two by two places a moment; four positions a second, two frames a moment: half a second is two positions
    time, row, column = fresh.sight.positions(tokens, [clip]).T
    assert time.tolist() == [0, *4 * [1], *4 * [3], *4 * [5], 6, 7]
    assert row.tolist() == [0, *3 * [1, 1, 2, 2], 6, 7] and column.tolist() == [0, *3 * [1, 2, 1, 2], 6, 7]


def test_the_vision_tower_looks_once_at_a_picture_of_a_group(policy, monkeypatch):
    inputs, *_ = conversations(policy)
    seen, features = [], type(policy.sight).features
    monkeypatch.setattr(type(policy.sight), "features", lambda s, m, some: seen.append(some) or features(s, m, some))
    gradients, again = {}, copy.deepcopy(policy)
    recompute(again)
    for name, groups, whose in (("apart", apart(inputs), policy), ("together", inputs, again)):
        whose(groups).logprobs.sum().backward()
        gradients[name] = {key: p.grad for key, p in whose.named_parameters() if p.grad is not None}
        whose.zero_grad()
    assert seen == [[policy.sight.read(name) for name in (ONE, OTHER, WIDE)]] * 2 and len(policy.blocks()) > len(
        blocks_of(policy.model)
    )
    tower = [key for key in gradients["apart"] if "vis" in key]
    assert any(gradients["apart"][key].abs().max() > 1e-4 for key in tower)
    for key, grad in gradients["apart"].items():
        assert torch.allclose(gradients["together"][key], grad, atol=1e-4 * float(grad.abs().max()) + 1e-6), key


def test_a_later_turn_shows_more_pictures_and_keeps_what_was_read(policy):
    first = policy.tokenizer.encode(said(WIDE), first=True)
    engine = make_engine(policy.config, policy)
    engine.begin(0, 3, "train", SamplingRule())
    engine.add(Request("a", first, 6, 0, pictures=(WIDE,), keep=True))
    while engine.running:
        (answer,) = engine.step() or (None,)
    stream = [*first, *answer.tokens.tolist(), *policy.tokenizer.encode(said(ONE), first=False)]
    found = {}
    for other in (engine, make_engine(policy.config, policy)):
        if other is not engine:
            other.begin(0, 3, "train", SamplingRule())
        other.add(Request("b", stream, 6, 0, pictures=(WIDE, ONE)))
        while other.running:
            found[other] = (other.step() or (None,))[0]
    again, afresh = found.values()
    assert again.tokens.tolist() == afresh.tokens.tolist() and np.allclose(again.logprobs, afresh.logprobs, atol=1e-5)


def test_prompts_that_look_alike_and_show_other_pictures_share_no_keys(fresh):
    *_, engine = conversations(fresh, ((ONE,), (OTHER,)))
    assert engine.totals["prefilled"] == 2 * (len(fresh.tokenizer.encode(said(ONE), first=True)) - 1)
    assert engine.totals["copied"] == engine.totals["prefilled"]


def test_a_saved_policy_sees_as_before_and_transformers_reads_it(policy, tmp_path):
    inputs, *_ = conversations(policy, ((WIDE, ONE),))
    policy.save_pretrained(tmp_path / "ours")
    assert np.array_equal(scores(load_policy(tmp_path / "ours"), inputs), scores(policy, inputs))
    policy.save_published(tmp_path / "published")
    again = build(SEES, pretrained=str(tmp_path / "published"), max_tokens=6)
    assert np.array_equal(scores(again, inputs), scores(policy, inputs))


def test_a_written_placeholder_token_shows_nothing(fresh):
    """The answer is the very token that the model has for places of pictures."""
    prompt = fresh.tokenizer.encode(said(ONE), first=True)
    assert fresh.tokenizer.plain_text(prompt) == "sum: "
    stream = np.array([*prompt, fresh.model.config.image_token_id, 5])
    inputs = {"actions": stream[:, None, None], "mask": np.arange(len(stream))[:, None] >= len(prompt)}
    inputs |= {"lengths": np.array([len(stream)]), "groups": np.zeros(1), "pictures": [ONE]}
    assert np.isfinite(scores(fresh, inputs)).all()


@pytest.mark.parametrize("shape", [(48, 48), (3, 90), (90, 3), (31, 33), (64, 200), (200, 64), (257, 255)])
def test_a_picture_has_as_many_tokens_as_its_size_says_and_its_own_colours(shape, policy):
    seen = policy.sight.process(np.full((*shape, 3), (200, 0, 90), np.uint8))
    assert len(seen.tokens) == policy.sight.tokens_of_size(*shape)
    square = policy.sight.process(np.full((48, 48, 3), (200, 0, 90), np.uint8))
    colours = {*np.unique(square.pixels["pixel_values"])}
    assert {*np.unique(seen.pixels["pixel_values"])} - {0.0} == colours - {0.0}  # 0: padding


REFUSED = {
    "text": (lambda p, t: build(SEES, preset="tiny"), "reads only text"),
    "message": (lambda p, t: build().tokenizer.encode(said(ONE), first=True), "reads only text"),
    "placeholder": (lambda p, t: p.tokenizer.encode(said(ONE, text=p.sight.placeholder), first=True), "1 pictures"),
    "gone": (lambda p, t: p.tokenizer.encode(said("nowhere.png"), first=True), "no picture nowhere.png"),
    "room": (lambda p, t: p.sight.check_room([ONE, WIDE], 18), "the pictures have 25 tokens, .*conversation has 18"),
    "thin": (lambda p, t: p.sight.check_room([data_url(np.zeros((1, 300, 3), np.uint8))], 99), "cannot be processed"),
    "processor": (lambda p, t: Sight._processor(p.sight, t, {}), "preprocessor_config.json cannot be read"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_pictures_that_a_model_cannot_read_are_refused_with_a_sentence(name, fresh, tmp_path):
    call, words = REFUSED[name]
    with pytest.raises((ConfigError, PictureError, CheckpointError), match=words):
        call(fresh, tmp_path)


def test_few_pictures_stay_in_memory(fresh, monkeypatch):
    one = fresh.sight.read(ONE)
    monkeypatch.setattr(sight, "KEPT_BYTES", 3 * one.num_bytes)
    for seed in range(100, 110):
        fresh.sight.read(drawing("add", seed, 48))
    assert len(fresh.sight.kept) == 3 and fresh.sight.kept_bytes == 3 * one.num_bytes
    assert np.array_equal(fresh.sight.read(ONE).pixels["pixel_values"], one.pixels["pixel_values"])


def test_pictures_are_read_ahead_in_a_thread_and_once(fresh, monkeypatch):
    threads, own = {}, threading.get_ident()

    def load(name):
        threads[name] = [*threads.get(name, ()), threading.get_ident()]
        return load_picture(name)

    monkeypatch.setattr(sight, "load_picture", load)
    names = [drawing("count", seed, 48) for seed in range(600, 604)]
    monkeypatch.setattr(sight, "MOST_AHEAD", 2)
    fresh.sight.read_ahead([names[0], "nowhere.png", *names])
    places = [fresh.sight.read(name).places for name in names]
    assert len({*places}) == 1 and [len(threads[name]) for name in names] == [1] * 4
    assert own not in threads[names[0]] and threads[names[3]] == [own]
    with pytest.raises(PictureError, match=r"there is no picture nowhere.png"):
        fresh.sight.read("nowhere.png")
