"""Files of published folders that are not what they should be: each is refused in a line, none is taken as it is."""

import json

import pytest
import torch

from embodied.core.errors import CheckpointError, ConfigError
from embodied.core.types import ActionSpec, EnvSpec
from embodied.policies import load_policy, make_policy
from embodied.policies.base import check_like
from embodied.policies.config import MLPConfig
from embodied.policies.openvla.folder import TINY, settings_of
from embodied.policies.pi0 import policy as pi0
from embodied.policies.policy_folder import read_blobs
from embodied.policies.vla.image_processor import HALVES, processor_of
from embodied.policies.vla.policy import fast_tokenizer
from embodied.policies.vla.statistics import MEAN_STD, Scale, read_figures, statistics_of

RANGE = {"q01": [0.0, -1.0], "q99": [1.0, 1.0]}
NAN = float("nan")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"mask": [True]}, r"mask are of the sizes \(2,\), \(2,\) and \(1,\)"),
        ({"q01": [0.0]}, "q01 and q99"),
        ({"q01": "abc"}, "could not convert"),
        ({"q01": [[0.0], [-1.0]]}, "q01 and q99"),
        ({"q01": [0.0, NAN]}, "is no range"),
        ({"q01": [0.0, None]}, "is no range"),
        ({"q01": [0.0, 2.0]}, "is no range"),
    ],
)
def test_ranges_that_are_none_are_refused(change, reason):
    with pytest.raises(CheckpointError, match=f"here: the action statistics of kitchen cannot be read: .*{reason}"):
        statistics_of({"kitchen": {"action": RANGE | change}}, None, "here")


def test_a_mask_without_content_masks_nothing_and_hides_what_is_no_range():
    assert statistics_of({"kitchen": {"action": RANGE | {"mask": None}}}, None, "here").mask.all()
    masked = RANGE | {"q01": [0.0, NAN], "mask": [True, False]}
    assert statistics_of({"kitchen": {"action": masked}}, None, "here").from_unit(torch.zeros(2).numpy())[1] == 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"image_sizes": ["64", "64"]}, "sizes should be whole numbers, one is '64'"),
        ({"n_action_bins": 0}, "one is 0"),
        ({"text_config": "llama"}, "'str' object has no attribute"),
        ({"text_config": {"rope_scaling": {"type": "linear", "factor": 2}}}, r"rotary embedding \(linear\)"),
    ],
)
def test_sizes_of_openvla_that_cannot_be(change, reason):
    with pytest.raises((ValueError, AttributeError), match=reason):
        settings_of(TINY | change)
    with pytest.raises(KeyError, match="timm_model_ids"):
        settings_of({key: value for key, value in TINY.items() if key != "timm_model_ids"})
    assert settings_of(TINY | {"text_config": TINY["text_config"] | {"rope_parameters": {"rope_type": "default"}}})


@pytest.mark.parametrize("change", [{"action_dim": "8"}, {"max_token_len": "a"}, {"action_expert_variant": 3}])
def test_sizes_of_pi0_that_cannot_be(change):
    with pytest.raises(ValueError, match=f"{next(iter(change.values()))!r}"):
        pi0.settings_of(pi0.TINY | change, (), "pi0").check()


@pytest.mark.parametrize("stored", [3, [{"mean": [0.5] * 3}], [{"mean": [0.5] * 3, "std": [0.0] * 3}], [{"mean": 1}]])
def test_image_numbers_that_cannot_be(stored):
    with pytest.raises((KeyError, TypeError, ValueError)):
        processor_of({"tvf_normalize_params": stored}, ["siglip"], 64, "resize-naive", 1.0)
    good = [{"mean": HALVES[0], "std": HALVES[1]}]
    assert processor_of({"tvf_normalize_params": good}, ["siglip"], 64, "resize-naive", 1.0).normalize == (HALVES,)


@pytest.mark.parametrize(
    ("figures", "error", "reason"),
    [
        ({"mean": [0.0] * 2, "std": [1.0] * 2}, ConfigError, "are of 2 numbers, the env has 3"),
        ({"mean": [0.0] * 4, "std": [1.0] * 4}, ConfigError, "are of 4 numbers, the env has 3"),
        ({"mean": [0.0, NAN, 0.0], "std": [1.0] * 3}, CheckpointError, "damaged: mean and std"),
        ({"mean": [0.0] * 3, "std": [1.0, -1.0, 1.0]}, CheckpointError, "damaged: mean and std"),
    ],
)
def test_figures_that_do_not_fit_an_env(figures, error, reason):
    with pytest.raises(error, match=f"those of here .*{reason}"):
        Scale(3).adopt(figures, MEAN_STD, 1e-6, "those of here")


def test_figures_filled_up_with_zeros_and_of_what_the_env_does_not_tell_are_taken():
    Scale(3).adopt({"mean": [0.5] * 3 + [1e-10] * 29, "std": [1.0] * 3 + [0.0] * 29}, MEAN_STD, 1e-6, "here")
    Scale(0).adopt({"mean": [0.5] * 3, "std": [1.0] * 3}, MEAN_STD, 1e-6, "here")


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("norm_stats.json", {"norm_stats": {"state": {"mean": "abc"}, "actions": {}}}, "could not convert"),
        ("norm_stats.json", {"norm_stats": {"state": 3, "actions": {}}}, "no attribute"),
        ("policy_preprocessor.json", {"steps": 3}, "not iterable"),
        ("policy_preprocessor.json", {"steps": [3]}, "no attribute"),
    ],
)
def test_figures_that_cannot_be_read(name, content, reason, tmp_path):
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=f"{name} cannot be read: .*{reason}"):
        read_figures(tmp_path)


def test_weights_that_cannot_be_used(tmp_path):
    with pytest.raises(CheckpointError, match="weight x is of type int8: a quantised model"):
        check_like("x", torch.zeros(3, dtype=torch.int8), torch.zeros(3))
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"x": 3}}')
    with pytest.raises(CheckpointError, match="no weight_map of tensors"):
        read_blobs(tmp_path)


def test_a_tokenizer_neither_pads_nor_cuts_as_whoever_saved_it_did(tmp_path):
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
    assert fast_tokenizer(tmp_path, "", "").encode("lift it").ids == [7, 8]


def with_head(change):
    def damage(folder):
        content = (folder / "model.safetensors").read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        head = change(json.loads(content[8:end]))
        head = head if isinstance(head, bytes) else json.dumps(head).encode()
        (folder / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + content[end:])

    return damage


def with_shape(shape, num_bytes=8):
    entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, num_bytes]}
    return with_head(lambda head: head | {"log_std": entry})


def with_policy(**options):
    def damage(folder):
        content = json.loads((folder / "config.json").read_text())
        content["policy"] |= options
        (folder / "config.json").write_text(json.dumps(content))

    return damage


def with_env(folder):
    content = json.loads((folder / "config.json").read_text())
    content["env_spec"]["action"] |= {"dim": "two"}
    (folder / "config.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (with_head(lambda _: b"[" * 100_000), r"model\.safetensors is damaged: maximum recursion depth"),
        (with_head(lambda _: b"[1]"), r"model\.safetensors is damaged: its head holds no mapping"),
        (with_shape([2**70, 0], 0), r"model\.safetensors is damaged: log_std has the shape \[1180591"),
        (with_shape([2**40, 2**40, 0], 0), r"model\.safetensors is damaged: log_std has the shape"),
        (with_shape([-1, -2]), r"model\.safetensors is damaged: log_std has the shape \[-1, -2\]"),
        (with_shape([True, 2]), r"model\.safetensors is damaged: log_std has the shape \[True, 2\]"),
        (with_shape([1] * 70 + [2]), r"model\.safetensors is damaged: log_std has the shape"),
        (with_policy(hidden=[2**50]), r"config\.json: no policy can be built from it: RuntimeError: .*memory"),
        (with_policy(hidden=["wide"]), r"config\.json cannot be read: .*policy\.hidden\.0='wide': should be a "),
        (with_policy(depth=3), r"config\.json cannot be read: .*policy\.name=mlp: policy\.depth is unknown"),
        (with_policy(name="mpl"), r"config\.json cannot be read: policy\.name='mpl' is unknown; families: mlp"),
        (with_policy(name=["mlp"]), r"config\.json cannot be read: policy\.name=\['mlp'\] is unknown"),
        (
            with_policy(name="nets:Mine"),
            r"config\.json cannot be read: .*policy\.name=nets:Mine: policy\.\w+ is unknown",
        ),
        (with_env, r"config\.json cannot be read: env_spec\.action\.dim='two': should be a valid integer"),
    ],
)
def test_a_folder_of_ours_that_cannot_be_is_refused_in_a_line_of_ours(damage, reason, tmp_path):
    make_policy(MLPConfig(hidden=(8,)), EnvSpec(ActionSpec(2), state_dim=4), 0).save_pretrained(tmp_path)
    (tmp_path / "checksums.json").unlink()
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=f"^{tmp_path}/{reason}") as refused:
        load_policy(tmp_path)
    assert "\n" not in str(refused.value) and "0x" not in str(refused.value)
