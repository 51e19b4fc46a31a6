"""Folders as others publish them: read, acted with, saved, written back, and refused if they cannot be."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_vla import FAMILIES, OFT, ROBOT, build, change_json, noise, observe, publish, weights_of

from embodied.core.errors import CheckpointError, ConfigError
from embodied.core.types import ActionSpec
from embodied.policies import hub, load_policy
from embodied.policies.openvla.folder import TINY, read_published
from embodied.policies.pi0.config import Pi0Config
from embodied.policies.pi0.policy import TINY as PI0
from embodied.policies.policy_folder import published_family
from embodied.policies.vla.config import FlowConfig
from embodied.policies.vla.policy import fast_tokenizer


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("published")
    return {family: publish(root / family, family) for family in FAMILIES}


def opened(folders, family, **options):
    options |= {"chunk": 2} if family == "oft" else {}
    return build(FAMILIES[family], seed=3, **{"pretrained": str(folders[family])} | options)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_comes_back_byte_by_byte_and_acts_wherever_it_is(family, folders, tmp_path):
    assert published_family(folders[family]) == FAMILIES[family]
    policy = opened(folders, family, dtype="bfloat16")
    if family == "oft":
        assert (policy.head, policy.proprio, policy.film) == ("l1", True, True)
    policy.save_pretrained(tmp_path / "ours")
    again = load_policy((tmp_path / "ours").rename(tmp_path / "moved"))
    one, two = (each.act(observe(2), noise(each, 2)) for each in (policy, again))
    assert np.array_equal(one.actions, two.actions) and np.array_equal(one.values, two.values)
    again.save_published(tmp_path / "back", shard_bytes=1_000_000)
    before, after = weights_of(folders[family]), weights_of(tmp_path / "back")
    assert len([*(tmp_path / "back").glob("model-*")]) > 2 and before.keys() == after.keys()
    assert all(before[key].dtype == after[key].dtype and torch.equal(before[key], after[key]) for key in before)
    configs = [json.loads((folder / "config.json").read_text()) for folder in (folders[family], tmp_path / "back")]
    assert {key: configs[1][key] for key in configs[0]} == configs[0]
    third = opened({family: tmp_path / "back"}, family, dtype="bfloat16")  # statistics went along
    assert np.array_equal(*(each.act(observe(2), noise(each, 2), 0.0).actions for each in (policy, third)))


def test_actions_of_openvla_have_the_units_of_the_statistics(folders):
    for family, more in (("openvla", {"gripper": "bridge"}), ("oft", {"statistics": "shelf"})):
        policy = opened(folders, family, **more)
        assert policy.statistics.from_unit(torch.zeros(3))[0] == pytest.approx(0.1)  # the middle of -0.1 and 0.3
    assert policy.proprio_statistics.high[0] == 2.0
    actions = (
        opened(folders, "openvla", gripper="bridge").act(observe(), np.random.default_rng(0).random((4, 3))).actions
    )
    assert (actions[..., :2] > -0.1 - 1e-6).all() and (actions[..., :2] < 0.3 + 1e-6).all()
    assert set(np.unique(actions[..., 2])) <= {-1.0, 1.0}


def test_states_and_actions_of_flows_have_the_units_of_the_statistics(folders, tmp_path):
    policy, obs, unit = opened(folders, "pi0", relative_actions=1), observe(2), torch.ones(2, 8, 8)
    np.testing.assert_allclose(policy._unit_state(obs).numpy(), (obs["state"] - 0.5) / (0.25 + 1e-6), rtol=1e-5)
    played = policy._env_actions(unit, obs)
    np.testing.assert_allclose(played[:, 0, 0], 1.1 + obs["state"][:, 0], rtol=1e-5)  # 1 * 0.1 + 1, and the state
    np.testing.assert_allclose(played[:, :, 1:], 1.0, rtol=1e-5)
    np.testing.assert_allclose(policy._unit_actions(played, obs)[:, :, :3], 1.0, atol=1e-4)
    other = build("pi05", statistics=str(folders["pi0"]))  # of a data set, without its model; by quantiles
    np.testing.assert_allclose(other._env_actions(unit, obs), 4.0, rtol=1e-5)
    place = shutil.copytree(folders["pi0"], tmp_path / "rlinf")
    (place / "assets" / "lab").rename(place / "lab")  # where RLinf puts them
    assert build("pi0", pretrained=str(place)).action_scale.shift.tolist() == [1, 0, 0]


CHAT, PURE = "A chat between a curious user", "In: What"


@pytest.mark.parametrize(
    ("name", "backbone", "begins"),
    [
        ("openvla-7b", "llama2-7b-pure", PURE),
        ("mine", "vicuna-v15-7b", CHAT),
        ("openvla-v01-7b", None, CHAT),
        ("mine", None, PURE),
    ],
)
def test_the_prompt_is_that_of_the_language_model(folders, tmp_path, name, backbone, begins):
    place = shutil.copytree(folders["openvla"], tmp_path / name)
    change_json(place / "config.json", llm_backbone_id=backbone)
    prompt = read_published(place).settings.template.format("lift the cup")
    assert prompt.startswith(begins) and "robot take to lift the cup?" in prompt
    assert prompt.endswith("ASSISTANT:" if begins == CHAT else "\nOut:")


def test_a_published_tokenizer_begins_with_1_ends_with_the_space_and_neither_pads_nor_cuts(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is damaged"):
        fast_tokenizer(tmp_path, "", "")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0, "lift": 7, "it": 8}, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.enable_padding(length=8)
    made.enable_truncation(1)
    made.save(str(path))
    policy = build()
    policy.fast = fast_tokenizer(tmp_path, "", "")
    assert policy.encode("lift it") == [1, 7, 8, 29871]


SHELF = {"shelf": {"action": {"q01": [0] * 3, "q99": [1] * 3}}}


@pytest.mark.parametrize(
    ("family", "name", "content", "words"),
    [
        ("openvla", "dataset_statistics.json", None, "no action statistics"),
        ("openvla", "model-00002-of-00002.safetensors", None, "incomplete: model-00002"),
        ("openvla", "config.json", None, "config.json is missing"),
        ("openvla", "config.json", {"model_type": "llama"}, "model_type='llama'"),
        (
            "openvla",
            "config.json",
            TINY | {"text_config": TINY["text_config"] | {"hidden_size": 64}},
            "this policy has",
        ),
        ("openvla", "config.json", TINY | {"llm_backbone_id": "llama2-7b-pure"}, "no tokenizer.json"),
        ("openvla", "config.json", TINY | {"llm_backbone_id": "llama2-7b-chat"}, "unsupported prompt format"),
        ("openvla", "config.json", TINY | {"image_sizes": ["64", "64"]}, "sizes should be whole numbers, one is '64'"),
        (
            "openvla",
            "config.json",
            TINY | {"text_config": {"rope_scaling": {"type": "linear"}}},
            r"embedding \(linear\)",
        ),
        ("oft", "dataset_statistics.json", SHELF, "has no 'proprio'"),
        ("oft", "action_head--150_checkpoint.pt", b"nonsense", "cannot be read as tensors"),
        ("oft", "action_head--7_checkpoint.pt", b"", "holds both action_head--"),
        ("oft", "noisy_action_projector--150_checkpoint.pt", b"", "diffusion head"),
        ("pi0", "assets", None, r"no statistics[\s\S]*norm_stats.json"),
        ("pi0", "config.json", {"type": "act"}, "type='act'"),
        ("pi0", "config.json", {"type": "pi0"}, "it has no 'paligemma_variant'"),
        ("pi0", "config.json", PI0 | {"paligemma_variant": "gemma_2b"}, r"no tokenizer.json.*paligemma-3b-pt-224"),
        ("pi0", "config.json", PI0 | {"action_expert_variant": "dummy"}, "this policy has"),
        ("pi05", "policy_preprocessor.json", {"steps": 3}, "policy_preprocessor.json cannot be read"),
        ("smolvla", "config.json", {"attention_mode": "self_attn"}, "attention_mode='self_attn', which is not"),
        ("smolvla", "config.json", {"vlm_model_name": "other/vlm"}, "built on 'other/vlm'; known: "),
        ("smolvla", "config.json", {"use_peft": True}, "merge the adapters into the weights first"),
        ("smolvla", "config.json", {"min_period": 0}, r"min_period and max_period should be .*, not \(0, 4.0\)"),
        ("smolvla", "config.json", {"num_vlm_layers": "4"}, "config.json cannot be read: "),
    ],
)
def test_a_folder_that_cannot_be_is_refused_with_the_reason(folders, tmp_path, family, name, content, words):
    for file in folders[family].iterdir():
        if file.name != name:
            (tmp_path / file.name).symlink_to(file)
    if family == "smolvla":
        content = json.loads((folders[family] / name).read_text()) | content
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(CheckpointError, match=words):
        opened({family: tmp_path}, family)


def test_a_folder_of_another_family_is_refused(folders):
    with pytest.raises(CheckpointError, match=r"holds a pi0, not a pi05: policy\.name=pi0"):
        build("pi05", pretrained=str(folders["pi0"]))


BOTH = ("openvla", "pi0")


@pytest.mark.parametrize(
    ("families", "change", "options", "words"),
    [
        (BOTH, {"images": {}}, {}, "needs images"),
        (BOTH, {"instruction": False}, {}, r"policy\.instruction"),
        (BOTH, {"action": ActionSpec(1, 4)}, {}, "takes a choice"),
        (["openvla"], {}, {"camera": None}, r"policy\.camera=top\|wrist"),
        (["openvla_oft"], {}, {"cameras": ("front",)}, r"policy\.cameras='front' is none of .*: top, wrist"),
        (["openvla_oft"], {}, {"head": "l1", "temperature": 1.6}, "writes none"),
        (["openvla_oft"], {}, {"head": "l1", "sft_loss": "vocabulary"}, r"policy\.sft_loss is of tokens"),
        (["openvla_oft"], {"state_dim": None}, {"proprio": True}, "env.state=proprio"),
        (["pi0"], {"state_dim": None}, {}, "env.state=proprio"),
        (["pi0"], {"state_dim": 33}, {}, "room for 32 state numbers"),
        (["pi0", "openvla"], {}, {"statistics": "nowhere"}, "nowhere is neither a data set that"),
        (["pi0"], {}, {"keyframes": [0], "train": "expert"}, r"policy\.keyframes trains the vision encoder"),
        (["smolvla", "openvla"], {}, {"keyframes": [4]}, r"policy\.keyframes=\[4\].*gives 4; set env\.state=proprio"),
    ],
)
def test_an_env_that_a_published_policy_cannot_act_in_is_refused_with_a_way_out(families, change, options, words):
    for family in families:
        with pytest.raises(ConfigError, match=words):
            build(family, spec=replace(ROBOT, **change), **options)


@pytest.mark.parametrize("family", ["pi0", "smolvla"])
def test_a_folder_whose_model_predicts_fewer_actions_is_refused_without_opening_it(family, folders, tmp_path):
    opened(folders, family).save_pretrained(tmp_path)
    for folder in (folders[family], tmp_path):
        config = build(family, pretrained=str(folder)).config
        long = config.model_copy(update={"chunk": 9})
        with pytest.raises(ConfigError, match=r"policy.chunk=9 is more than the 8 actions .*; try policy.chunk=8"):
            hub.with_folder(long)
        hub.with_folder(long.model_copy(update={"horizon": 9}))


def test_a_family_of_another_package_has_its_own_sizes():
    class Larger(FlowConfig):
        preset: str = "huge"

    Larger(name="larger", chunk=40).check_sizes(None)


def test_code_in_a_component_is_not_run(folders, tmp_path):
    class Trap:
        def __reduce__(self):
            return print, ("run",)

    for file in folders["oft"].iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "action_head--150_checkpoint.pt").unlink()
    torch.save({"a": Trap()}, tmp_path / "action_head--150_checkpoint.pt")
    with pytest.raises(CheckpointError, match="cannot be read as tensors: it holds other things too"):
        build("openvla_oft", pretrained=str(tmp_path), **OFT)


def test_a_model_named_by_its_hub_id_is_fetched(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(hub, "fetch", lambda name, key, *more: asked.append((name, key)) or tmp_path)
    config = Pi0Config(name="pi0", pretrained="lab/pi0")
    assert hub.with_folder(config).pretrained == str(tmp_path) and asked == [("lab/pi0", "policy.pretrained")]
    build("pi0").save_pretrained(tmp_path)
    assert hub.with_folder(Pi0Config(name="pi0", pretrained=str(tmp_path))).pretrained == str(tmp_path)
    with pytest.raises(CheckpointError, match=r"policy.pretrained=/not/here: there is no such folder"):
        hub.with_folder(Pi0Config(name="pi0", pretrained="/not/here"))


@pytest.mark.parametrize(
    ("features", "empty", "renamed", "order"),
    [
        (("wrist", "front"), 0, {}, ["wrist", "front"]),
        (("camera1", "camera2", "empty_camera_0"), 1, {"wrist": "camera1", "front": "camera2"}, ["wrist", "front"]),
        (("front", "empty_camera_0", "empty_camera_1"), 2, {}, ["front"]),
        (("camera1", "camera2"), 0, {}, ["front", "wrist"]),
    ],
)
def test_cameras_of_a_lerobot_folder_are_in_the_models_order(features, empty, renamed, order, folders, tmp_path):
    pictures = "observation.images."
    folder = shutil.copytree(folders["smolvla"], tmp_path / "folder")
    change_json(folder / "config.json", input_features={pictures + name: {} for name in features}, empty_cameras=empty)
    rename_map = {pictures + one: pictures + other for one, other in renamed.items()}
    rename = {"registry_name": "rename_observations_processor", "config": {"rename_map": rename_map}}
    steps = json.loads((folder / "policy_preprocessor.json").read_text())["steps"]
    change_json(folder / "policy_preprocessor.json", steps=[rename, *steps])
    spec = replace(ROBOT, images={"front": (32, 32, 3), "wrist": (32, 32, 3)})
    assert build("smolvla", spec=spec, pretrained=str(folder)).views == order
    assert build("smolvla", spec=spec, pretrained=str(folder), cameras=("wrist",)).views == ["wrist"]


def test_a_tokenizer_is_also_found_where_lerobot_puts_it(tmp_path):
    from tokenizers import Tokenizer, models

    (tmp_path / "tokenizer").mkdir()
    Tokenizer(models.WordLevel({"push": 7, "[UNK]": 0}, unk_token="[UNK]")).save(
        str(tmp_path / "tokenizer" / "tokenizer.json")
    )
    assert fast_tokenizer(tmp_path, "a model", "copy it").encode("push").ids == [7]
