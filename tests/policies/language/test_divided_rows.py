"""Ranks that compute conversations together score and learn as one rank alone does."""

from pathlib import Path

import numpy as np
import pytest
from rank_processes import run_ranks
from tiny_language import answers, inputs_of, write
from tiny_sight import publish
from transformers import GptOssConfig, Qwen3Config, Starcoder2Config
from written_videos import write_video

from embodied.policies.language.attention import parts_of_ranks
from embodied.policies.language.config import SEEING
from embodied.policies.language.packing import lay_out

PROGRAM = Path(__file__).with_name("divided_ranks.py")
LAYER_NORMS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.parametrize("ranks", [2, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (4, 8))])
def test_divided_conversations_have_the_scores_and_gradients_of_one_rank(tmp_path, ranks):
    """With shared prompts, turns, windows, sinks, layers frozen or computed again, exchanges in halves, and
    fewer tokens than ranks."""
    words = {"vocab_size": 100, "eos_token_id": 1, "bos_token_id": None, "max_position_embeddings": 256}
    folder = write(tmp_path / "model", Starcoder2Config(**words, **LAYER_NORMS, intermediate_size=48, sliding_window=8))
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 8}
    heads = LAYER_NORMS | {"num_key_value_heads": 4}
    write(folder / "sinks", GptOssConfig(**words, **heads, **experts, intermediate_size=48))
    eight = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 8}
    write(folder / "eight", Qwen3Config(**words, **LAYER_NORMS | eight, intermediate_size=48))
    rows = run_ranks(PROGRAM, tmp_path / "meet", ranks, folder, cells=5)
    models = {name for name, *_ in rows}
    assert len(models) == (1 if ranks == 8 else 6)
    assert {int(degree) for _, degree, *_ in rows} == {degree for degree in (2, 4, 8) if degree <= ranks}
    for name, degree, scores, gradient, others in rows:
        bar = {"recomputed": 1e-6, "sinks": 1e-4}.get(name, 1e-12)  # these compute norms, or all, in float32
        assert float(scores) < bar and float(gradient) < bar, (name, degree)
        assert name == "one token" or float(others) > 0.01, (name, degree)


def test_a_picture_or_video_is_seen_by_all_ranks_a_part_each(tmp_path):
    """Tiles of one picture, moments of one video, and both beside a small picture; of one tile one rank sees all."""
    for kind in SEEING:
        publish(tmp_path / kind, kind)
    frames = np.random.default_rng(0).integers(0, 256, (8, 32, 32, 3), np.uint8)
    write_video(tmp_path / "a.mp4", frames, 4)
    rows = run_ranks(PROGRAM.with_name("divided_pictures.py"), tmp_path / "meet", 2, tmp_path, cells=5)
    assert len(rows) == 2 * 3 * len(SEEING)
    for kind, shown, features, gradient, share in rows:
        assert float(features) < 1e-10 and float(gradient) < 1e-10, (kind, shown)
        assert float(share) < 0.7 or (kind, shown) == ("qwen2_5_vl", "one"), (kind, shown)


def test_every_place_belongs_to_one_rank():
    """Rows of 5 places on 2 ranks: places 0, 2, 4 and 1, 3, 5."""
    inputs = inputs_of(*answers([7, 8], [9], prompt=(5, 6)))
    tokens, mask = (inputs[name].reshape(-1) for name in ("actions", "mask"))
    packed = lay_out(tokens, mask, inputs["lengths"], inputs["groups"])
    first, second = parts_of_ranks(packed, 2)
    assert first.ids.tolist() == [[5, 7, 9]] and second.ids.tolist() == [[6, 8, 0]]
    assert first.positions.tolist() == [[0, 2, 2]] and second.positions.tolist() == [[1, 3, 0]]
    assert first.blocks.tolist() == second.blocks.tolist() == [[0, 0, 0, 0, 0, -1]]
    assert (first.sources.tolist(), first.takes.tolist(), first.scored.tolist()) == ([1], [0], [3])
    assert (second.sources.tolist(), second.takes.tolist(), second.scored.tolist()) == ([0], [0, 0], [2, 6])
    assert np.array_equal(np.sort(np.concatenate([first.scored, second.scored])), packed.scored)
