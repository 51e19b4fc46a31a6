"""Runs whose conversations show pictures: they are learned from as they were answered, and their pixels stay away from
the driver."""

import numpy as np
import pytest
from talking_runs import ONE_OF_EACH, Talk
from written_videos import write_video

from embodied.runtime.payload import MessageSocket

PICTURES = ["policy.preset=tiny_vl", "policy.max_length=200"]
TURNS = 2  # iterations whose bytes are counted, behind one that starts everything
SMALL, MIDDLE, LARGE = 64, 128, 256  # pixels of a side


@pytest.mark.parametrize(("env", "tokens"), [("Shown", 10), ("ShownAgain", 40)])
def test_a_policy_learns_from_pictures_as_it_saw_them(env, tokens, tmp_path):
    options = [*PICTURES, f"env.name=talking_env:{env}", f"policy.max_tokens={tokens}", "algo.groups=4"]
    with Talk(tmp_path, *options, placement=ONE_OF_EACH) as run:
        before = run.weights()
        for episodes, row in run.some(1 if env == "ShownAgain" else 2):
            assert max(episode.length for episode in episodes) == (3 if env == "ShownAgain" else 1)
            assert np.var([episode.total_reward for episode in episodes]) > 0
            assert min(episode.places for episode in episodes) >= 16  # of 64 pixels
            assert row["train/grad_norm"] > 1e-3 and row["train/logprob_gap"] < 1e-4
        tower = [name for name in before if "visual" in name]
        after = run.weights()
        assert any(np.abs(after[name] - before[name]).max() > 1e-6 for name in tower)


def test_a_policy_learns_from_videos_as_it_saw_them(tmp_path):
    frames = np.random.default_rng(0).integers(0, 256, (12, 48, 64, 3), np.uint8)
    shown = [f"env.kwargs={{video: {write_video(tmp_path / 'a.mp4', frames, 2)}}}", "env.name=talking_env:Moving"]
    with Talk(tmp_path / "run", *PICTURES, *shown, "policy.max_tokens=10", placement=ONE_OF_EACH) as run:
        ((episodes, row),) = run.some(1)
        assert {episode.places for episode in episodes} <= {12, 24, 36}  # one to three moments of three by four places
        assert row["train/grad_norm"] > 1e-3 and row["train/logprob_gap"] < 1e-4


@pytest.fixture
def received(monkeypatch):
    """Bytes of every message that has come to this process, the driver's, in shared memory or not."""
    sizes, receive = [], MessageSocket.receive

    def counted(self):
        message, payload, fd = receive(self)
        if payload is not None:
            sizes.append(len(payload.body) + (payload.layout.total_bytes if payload.layout else 0))
        return message, payload, fd

    monkeypatch.setattr(MessageSocket, "receive", counted)
    return sizes


def bytes_in_driver(folder, received, **options):
    """Bytes that come to the driver in an iteration where sims, policies and learners are processes of their own."""
    kwargs = ", ".join(f"{name}: {value}" for name, value in options.items()).lower()
    more = [*PICTURES, "env.name=talking_env:Shown", f"env.kwargs={{{kwargs}}}", "policy.dtype=float32"]
    with Talk(folder, *more, placement=ONE_OF_EACH, backend="local") as run:
        run.iterate(0)
        before = sum(received)
        for number in range(1, 1 + TURNS):
            run.iterate(number)
        return (sum(received) - before) / TURNS


@pytest.mark.slow
def test_bytes_in_the_driver_do_not_depend_on_the_size_of_pictures(tmp_path, received):
    found = {size: bytes_in_driver(tmp_path / str(size), received, pixels=size) for size in (SMALL, MIDDLE, LARGE)}
    print(found)
    assert 0 < max(found.values()) < 1.05 * min(found.values())
    travelling = bytes_in_driver(tmp_path / "inline", received, pixels=LARGE, inline=True)
    print(travelling)
    assert travelling > 1.2 * max(found.values())  # some pictures travel, with the samples
