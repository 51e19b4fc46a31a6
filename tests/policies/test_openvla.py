import json
import math
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from embodied.core.errors import CheckpointError, ConfigError
from embodied.core.types import ActionSpec, EnvSpec
from embodied.policies import load_policy, make_policy
from embodied.policies.config import OpenVLAConfig
from embodied.policies.openvla.folder import TINY, read_published
from embodied.policies.openvla.tokens import ActionTokens, pick
from embodied.policies.vla.policy import fast_tokenizer, padded
from embodied.policies.vla.statistics import Statistics, statistics_of

SPEC = EnvSpec(ActionSpec(7), images={"top": (48, 48, 3)}, instruction=True)
SMALL = TINY | {
    "text_config": TINY["text_config"] | {"hidden_size": 64},
}


def build(seed=0, spec=SPEC, **options):
    return make_policy(OpenVLAConfig(name="openvla", **options), spec, seed)


def observe(rows=4, texts=("pick up the red cup", "go")):
    frames = np.random.default_rng(0).integers(0, 256, (rows, 48, 48, 3), np.uint8)
    return {"images": {"top": frames}, "instruction": [texts[row % len(texts)] for row in range(rows)]}


def uniform(rows, seed=1):
    return np.random.default_rng(seed).random((rows, 7))


@pytest.fixture(scope="module")
def policy():
    made = build(temperature=1.6)
    with torch.no_grad():
        made.language_model.lm_head.weight.mul_(5)  # probabilities that differ
    return made


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A folder as others publish it: shards, statistics apart, brain floats."""
    folder = tmp_path_factory.mktemp("published")
    made = build(dtype="bfloat16")
    ours = ("value_head.", "ranges.")
    weights = {name: value for name, value in made.state_dict().items() if not name.startswith(ours)}
    names = sorted(weights)
    index = {}
    for number, part in enumerate((names[:100], names[100:]), 1):
        shard = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: weights[name] for name in part}, folder / shard)
        index |= dict.fromkeys(part, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (folder / "config.json").write_text(json.dumps(TINY))
    low, high = [-0.1] * 6 + [0.0], [0.3] * 6 + [1.0]
    stats = {"kitchen": {"action": {"q01": low, "q99": high, "mask": [True] * 6 + [False]}}}
    (folder / "dataset_statistics.json").write_text(json.dumps(stats))
    return folder


def test_what_follows_the_features_that_are_read_is_frozen():
    still = {name.split(".")[2] for name, p in build().named_parameters() if not p.requires_grad}
    assert still == {"blocks", "norm", "attn_pool"}  # the towers' last blocks and what comes after them


def test_sampling_follows_the_tempered_probabilities():
    logits = torch.tensor([0.0, 1.0, -1.0, 0.5])
    numbers = (torch.arange(20_000) + 0.5) / 20_000
    for temperature in (1.0, 0.5):
        tokens = pick(logits.expand(20_000, 4), numbers, temperature)
        wanted = (logits / temperature).softmax(-1)
        np.testing.assert_allclose(np.bincount(tokens, minlength=4) / 20_000, wanted, atol=1e-3)


def test_action_tokens_by_hand():
    codes = ActionTokens(256)
    # 256 edges are 2/255 apart. Published ids are 32000 - bin with bins from 1, ours count from id 31744.
    assert codes.encode(np.array([-1.0, 1.0, 0.0])).tolist() == [255, 0, 128]
    assert codes.decode(np.array([255]))[0] == pytest.approx(-1 + 1 / 255)
    assert codes.decode(np.array([0]))[0] == codes.decode(np.array([1]))[0] == pytest.approx(1 - 1 / 255)
    assert np.array_equal(codes.encode(codes.decode(np.arange(1, 256))), np.arange(1, 256))


def test_statistics_scale_what_the_mask_says():
    statistics = Statistics(np.array([-2.0, 0.0]), np.array([4.0, 1.0]), np.array([True, False]))
    assert statistics.from_unit(np.array([[0.5, 0.5]])).tolist() == [[2.5, 0.5]]  # 0.5 * 1.5 * 6 - 2
    assert statistics.to_unit(np.array([[2.5, 0.5]])).tolist() == [[0.5, 0.5]]
    stats = {"a": {"action": {"q01": [0.0], "q99": [1.0]}}, "b_no_noops": {"action": {"q01": [0.0], "q99": [2.0]}}}
    assert statistics_of(stats, "b", "x").high == [2.0] and statistics_of(stats, "a", "x").mask.all()
    with pytest.raises(ConfigError, match=r"policy\.statistics=a\|b_no_noops"):
        statistics_of(stats, None, "x")
    with pytest.raises(ConfigError, match="there are: a, b_no_noops"):
        statistics_of(stats, "c", "x")


def test_prompts_are_aligned_behind_the_first_token():
    ids, there = padded([[1, 5, 6], [1, 7]], in_front=True)
    assert ids.tolist() == [[1, 5, 6], [1, 0, 7]] and there.tolist() == [[True] * 3, [True, False, True]]


@pytest.mark.parametrize(
    ("folder", "backbone", "begins"),
    [
        ("openvla-7b", "llama2-7b-pure", "In: What"),
        ("openvla-v01-7b", "vicuna-v15-7b", "A chat between a curious user"),
        ("mine", "vicuna-v15-7b", "A chat between a curious user"),
        ("openvla-v01-7b", None, "A chat between a curious user"),
        ("mine", None, "In: What"),
    ],
)
def test_a_model_that_grew_from_a_chat_is_told_in_one(published, tmp_path, folder, backbone, begins):
    config = json.loads((published / "config.json").read_text()) | {"llm_backbone_id": backbone}
    place = shutil.copytree(published, tmp_path / folder)
    (place / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    said = read_published(place).settings.template.format("lift the cup")
    assert said.startswith(begins) and "robot take to lift the cup?" in said
    assert said.endswith("ASSISTANT:" if begins.startswith("A chat") else "\nOut:")


def test_a_model_that_is_told_in_another_way_is_refused(published, tmp_path):
    place = shutil.copytree(published, tmp_path / "chat")
    config = json.loads((published / "config.json").read_text()) | {"llm_backbone_id": "llama2-7b-chat"}
    (place / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="llm_backbone_id='llama2-7b-chat' uses an unsupported prompt format"):
        build(pretrained=str(place))


def test_a_published_tokenizer_begins_with_1_and_ends_with_the_space(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0, "lift": 7, "it": 8}, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    policy = build()
    policy.fast = fast_tokenizer(tmp_path, "", "")
    assert policy.encode("lift it") == [1, 7, 8, 29871]


def test_a_published_folder_comes_back_byte_by_byte(published, tmp_path):
    made = build(seed=3, pretrained=str(published), dtype="bfloat16")
    made.save_published(tmp_path / "again", shard_bytes=2_000_000)
    files = sorted((tmp_path / "again").glob("*.safetensors"))
    assert len(files) > 2
    before, after = (
        {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}
        for folder in (published, tmp_path / "again")
    )
    assert before.keys() == after.keys()
    assert all(before[name].dtype == after[name].dtype and torch.equal(before[name], after[name]) for name in before)
    again = build(seed=3, pretrained=str(tmp_path / "again"), dtype="bfloat16")
    assert np.array_equal(again.act(observe(2), uniform(2)).actions, made.act(observe(2), uniform(2)).actions)


def test_actions_have_the_units_of_the_statistics(published):
    made = build(pretrained=str(published), gripper="bridge")
    actions = made.act(observe(), uniform(4)).actions
    assert (actions[..., :6] > -0.1 - 1e-6).all() and (actions[..., :6] < 0.3 + 1e-6).all()
    assert set(np.unique(actions[..., 6])) <= {-1.0, 1.0}
    assert math.isclose(made.statistics.from_unit(np.zeros(7))[0], 0.1, abs_tol=1e-12)  # the middle of -0.1 and 0.3


def test_a_saved_policy_needs_nothing_but_its_folder(published, tmp_path):
    made = build(pretrained=str(published))
    made.save_pretrained(tmp_path / "saved")
    again = load_policy((tmp_path / "saved").rename(tmp_path / "moved"))
    assert again.config.pretrained == str(tmp_path / "moved")
    one, two = (p.act(observe(2), uniform(2)) for p in (made, again))
    assert np.array_equal(one.actions, two.actions) and np.array_equal(one.values, two.values)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("dataset_statistics.json", None, "no action statistics"),
        ("model-00002-of-00002.safetensors", None, "incomplete: model-00002"),
        ("config.json", None, "config.json is missing"),
        ("config.json", {"model_type": "llama"}, "model_type='llama'"),
        ("config.json", SMALL, "this policy has"),
        ("config.json", TINY | {"llm_backbone_id": "llama2-7b-pure"}, "no tokenizer.json"),
    ],
)
def test_an_incomplete_folder_is_refused_and_says_what_is_missing(published, tmp_path, name, content, reason):
    for file in published.iterdir():
        if file.name != name:
            (tmp_path / file.name).symlink_to(file)
    if content is not None:
        (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=reason):
        build(pretrained=str(tmp_path))


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (EnvSpec(ActionSpec(7), state_dim=3), "needs images"),
        (EnvSpec(ActionSpec(7), images={"a": (8, 8, 3), "b": (8, 8, 3)}, instruction=True), r"policy\.camera=a\|b"),
        (EnvSpec(ActionSpec(7), images={"a": (8, 8, 3)}), "policy.instruction"),
        (EnvSpec(ActionSpec(1, 4), images={"a": (8, 8, 3)}, instruction=True), "takes a choice"),
    ],
)
def test_an_env_it_cannot_act_in_is_refused_with_a_way_out(spec, reason):
    with pytest.raises(ConfigError, match=reason):
        build(spec=spec)
