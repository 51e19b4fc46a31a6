"""Folders that are not what they should be: each is refused in a line, none is taken as it is."""

import json
import os

import pytest
import torch
from safetensors.torch import save_file

from embodied.core.errors import CheckpointError, ConfigError
from embodied.core.types import ActionSpec, EnvSpec
from embodied.policies import load_policy, make_policy
from embodied.policies.base import check_like
from embodied.policies.config import MLPConfig
from embodied.policies.policy_folder import check_files, checksums, read_blobs
from embodied.policies.vla.statistics import MEAN_STD, Scale, read_figures


@pytest.mark.parametrize(
    ("figures", "error", "reason"),
    [
        ({"mean": [0.0] * 2, "std": [1.0] * 2}, ConfigError, "are of 2 numbers, the env has 3"),
        ({"mean": [0.0] * 4, "std": [1.0] * 4}, ConfigError, "are of 4 numbers, the env has 3"),
        ({"mean": [0.0, float("nan"), 0.0], "std": [1.0] * 3}, CheckpointError, "damaged: mean and std"),
        ({"mean": [0.0] * 3, "std": [1.0, -1.0, 1.0]}, CheckpointError, "damaged: mean and std"),
    ],
)
def test_statistics_that_do_not_fit_an_env_are_refused(figures, error, reason):
    with pytest.raises(error, match=f"those of here .*{reason}"):
        Scale(3).adopt(figures, MEAN_STD, 1e-6, "those of here")


def test_figures_filled_up_with_zeros_and_of_what_the_env_does_not_tell_are_taken():
    Scale(3).adopt({"mean": [0.5] * 3 + [1e-10] * 29, "std": [1.0] * 3 + [0.0] * 29}, MEAN_STD, 1e-6, "here")
    Scale(0).adopt({"mean": [0.5] * 3, "std": [1.0] * 3}, MEAN_STD, 1e-6, "here")


def test_unusable_weights_and_statistics_are_refused(tmp_path):
    for wrong, words in (({"mean": "abc"}, "could not convert"), (3, "no attribute")):
        (tmp_path / "norm_stats.json").write_text(json.dumps({"norm_stats": {"state": wrong, "actions": {}}}))
        with pytest.raises(CheckpointError, match=f"norm_stats.json cannot be read: .*{words}"):
            read_figures(tmp_path)
    with pytest.raises(CheckpointError, match="weight x is of type int8: a quantised model"):
        check_like("x", torch.zeros(3, dtype=torch.int8), torch.zeros(3))
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"x": 3}}')
    with pytest.raises(CheckpointError, match="no weight_map of tensors"):
        read_blobs(tmp_path)


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


def with_long_head(folder):
    with (folder / "model.safetensors").open("wb") as file:
        file.write((10**8 + 1).to_bytes(8, "little"))
        file.truncate(10**8 + 99)  # takes no place on the disk


def with_dim(dim):
    def damage(folder):
        content = json.loads((folder / "config.json").read_text())
        content["env_spec"]["action"] |= {"dim": dim}
        (folder / "config.json").write_text(json.dumps(content))

    return damage


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (with_head(lambda _: b"[" * 100_000), r"model\.safetensors is damaged: maximum recursion depth"),
        (with_head(lambda _: b"[1]"), r"model\.safetensors is damaged: its head holds no mapping"),
        (with_long_head, r"model\.safetensors is damaged: its head has 100000001 bytes, and at most 100,000,000 are"),
        (with_head(lambda head: head | {"a\nb": head["log_std"]}), r"model\.safetensors is damaged: .* name 'a\\nb'"),
        (with_shape([2.0], 8.0), r"model\.safetensors is damaged: log_std has the shape \[2\.0\]"),
        (with_shape([2], 8.0), r"model\.safetensors is damaged: log_std lies at \[0, 8\.0\]"),
        (with_shape("a\nb"), r"model\.safetensors is damaged: log_std has the shape 'a\\nb'"),
        (with_shape([2**70, 0], 0), r"model\.safetensors is damaged: log_std has the shape \[1180591"),
        (with_policy(hidden=[2**50]), r"config\.json: no policy can be built from it: RuntimeError: .*memory"),
        (with_policy(hidden=["wide"]), r"config\.json cannot be read: .*policy\.hidden\.0='wide': should be a "),
        (with_policy(depth=3), r"config\.json cannot be read: .*policy\.name=mlp: policy\.depth is unknown"),
        (with_policy(name="mpl"), r"config\.json cannot be read: policy\.name='mpl' is unknown; families: mlp"),
        (
            with_policy(name="nets:Mine"),
            r"config\.json cannot be read: .*policy\.name=nets:Mine: policy\.\w+ is unknown",
        ),
        (with_dim("two"), r"config\.json cannot be read: env_spec\.action\.dim='two': should be a valid integer"),
        (with_dim(10**30), r"config\.json: no policy can be built from it: TypeError: .*Overflow"),
    ],
)
def test_a_folder_of_ours_that_cannot_be_is_refused_in_a_line_of_ours(damage, reason, tmp_path):
    make_policy(MLPConfig(hidden=(8,)), EnvSpec(ActionSpec(2), state_dim=4), 0).save_pretrained(tmp_path)
    (tmp_path / "checksums.json").unlink()
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=f"^{tmp_path}/{reason}") as refused:
        load_policy(tmp_path)
    assert "\n" not in str(refused.value) and "0x" not in str(refused.value)


def test_a_folder_without_config_or_with_weights_of_another_policy_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        load_policy(tmp_path)
    make_policy(MLPConfig(hidden=(8,)), EnvSpec(ActionSpec(2), state_dim=4), 0).save_pretrained(tmp_path)
    (tmp_path / "checksums.json").unlink()
    save_file({"other": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="do not belong"):
        load_policy(tmp_path)


def test_every_file_that_was_written_has_a_checksum_whatever_the_clock_says(tmp_path):
    weights, others = tmp_path / "weights", tmp_path / "notes.txt"
    others.write_text("of the user")
    with checksums(tmp_path):
        weights.write_text("1")
        os.utime(weights, (1, 1))
    others.write_text("changed")
    check_files(tmp_path)
    weights.write_text("2")
    with pytest.raises(CheckpointError, match="weights does not match its checksum"):
        check_files(tmp_path)
