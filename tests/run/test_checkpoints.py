import errno
import itertools
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from embodied.core.errors import CheckpointError
from embodied.core.files import read_arrays
from embodied.core.types import ActionSpec, EnvSpec
from embodied.policies import load_policy, make_policy
from embodied.policies.config import MLPConfig
from embodied.run.policy_source import find
from embodied.run.run_folder import (
    COUNTERS,
    SIMS,
    SaveClock,
    locate,
    name_of,
    newest,
    prune,
    read_counters,
    verify,
    write_checkpoint,
)
from embodied.train import main as train


def fill(folder: Path) -> None:
    (folder / "policy").mkdir()
    (folder / "policy" / "config.json").write_text("{}")
    (folder / "policy" / "model.safetensors").write_bytes(b"x" * 1000)


def write(run: Path, version: int) -> Path:
    (run / "run.json").write_text("{}")
    return write_checkpoint(run / "checkpoints", version, fill, state_of(version), {"rows.length": np.arange(3)})


def state_of(version: int) -> dict:
    return dict.fromkeys(COUNTERS, 0) | {"version": version}


def test_a_checkpoint_comes_back_as_it_was_written(tmp_path):
    path = write(tmp_path, 7)
    assert path.name == "v000007"
    assert verify(path) == state_of(7)
    assert read_arrays(path / SIMS)["rows.length"].tolist() == [0, 1, 2]
    assert newest(tmp_path) == path
    assert (tmp_path / "checkpoints" / "latest").read_text() == "v000007\n"
    assert locate(str(tmp_path)) == (path / "policy", path, tmp_path)
    assert locate(str(path)) == (path / "policy", path, tmp_path)
    assert locate(str(path / "policy")) == (path / "policy", None, None)


CALLS = [
    (os, "fsync"),
    (os, "rename"),
    (os, "replace"),
    (os, "open"),
    (Path, "write_text"),
    (Path, "write_bytes"),
    (Path, "mkdir"),
    (np, "savez"),
]


def test_whatever_write_call_fails_the_checkpoint_is_whole_or_absent(tmp_path, monkeypatch):
    old = write(tmp_path, 1)
    failures = 0
    for attempt in itertools.count():
        count = itertools.count()

        def failing(real, count=count, attempt=attempt):
            def call(*args, **kwargs):
                if next(count) == attempt:
                    raise OSError(errno.ENOSPC, "No space left on device")
                return real(*args, **kwargs)

            return call

        with monkeypatch.context() as patch:
            for owner, name in CALLS:
                patch.setattr(owner, name, failing(getattr(owner, name)))
            try:
                write_checkpoint(tmp_path / "checkpoints", 2, fill, state_of(2), {"a": np.zeros(2)})
                failed = False
            except OSError:
                failed = True
        found = newest(tmp_path)
        verify(found)
        if not failed:
            break
        failures += 1
        whole = tmp_path / "checkpoints" / "v000002"
        assert found == (whole if whole.exists() else old)
        assert not list((tmp_path / "checkpoints").glob(".writing-v*"))
        if whole.exists():  # only `latest` was missing: begin again without it
            import shutil

            shutil.rmtree(whole)
    assert failures > 12
    assert found.name == "v000002"


def test_a_damaged_checkpoint_is_refused_by_name_and_the_one_before_is_used(tmp_path):
    write(tmp_path, 1)
    second = write(tmp_path, 2)
    (second / "policy" / "model.safetensors").write_bytes(b"y" * 1000)
    with pytest.raises(CheckpointError, match=r"policy/model.safetensors does not match"):
        verify(second)
    assert newest(tmp_path).name == "v000001"
    (second / "policy" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model.safetensors is missing"):
        verify(second)


def test_a_wrong_file_latest_does_not_hide_the_newest_checkpoint(tmp_path):
    write(tmp_path, 1)
    for nonsense in ("v000009\n", "../../etc\n", ""):
        (tmp_path / "checkpoints" / "latest").write_text(nonsense)
        assert newest(tmp_path).name == "v000001"


def test_an_empty_run_says_so(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({}))
    with pytest.raises(CheckpointError, match="nothing was saved yet"):
        newest(tmp_path)
    with pytest.raises(CheckpointError, match="there is no such folder"):
        locate(str(tmp_path / "nowhere"))


def test_saving_the_same_version_twice_keeps_the_first(tmp_path):
    first = write(tmp_path, 3)
    stamp = first.stat().st_mtime_ns
    assert write(tmp_path, 3) == first
    assert first.stat().st_mtime_ns == stamp
    assert name_of(3) == "v000003"


@pytest.mark.parametrize("manifest", ["[]", "{}", '{"files": []}', '{"files": {}}', "null", "{"])
def test_a_checkpoint_whose_manifest_lists_no_files_is_refused(tmp_path, manifest):
    first, second = write(tmp_path, 1), write(tmp_path, 2)
    (second / "manifest.json").write_text(manifest)
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        verify(second)
    assert newest(tmp_path) == first


@pytest.mark.parametrize("key", COUNTERS)
@pytest.mark.parametrize("value", [None, -1, [], "x", 1e30])
def test_a_checkpoint_with_an_odd_counter_is_refused(tmp_path, key, value):
    write_checkpoint(tmp_path / "checkpoints", 1, fill, state_of(1) | {key: value}, {})
    with pytest.raises(CheckpointError, match=rf"state\.json has {key}="):
        read_counters(tmp_path / "checkpoints" / "v000001")


def test_a_damaged_checkpoint_is_replaced_when_its_version_is_saved_again(tmp_path):
    path = write(tmp_path, 3)
    (path / "policy" / "model.safetensors").write_bytes(b"y" * 1000)
    assert verify(write(tmp_path, 3)) == state_of(3)


def saves(clock, lengths, cost_s=0.0):
    """The iterations (of these lengths in seconds) after which a run is saved."""
    train_s, found = 0.0, []
    for iteration, seconds in enumerate(lengths, 1):
        train_s += seconds
        if clock.is_due(iteration, train_s):
            clock.note_save(iteration, train_s, cost_s)
            found.append(iteration)
    return found


@pytest.mark.parametrize(
    ("clock", "lengths", "cost_s", "found"),
    [
        # Iterations of 100 s: after the second, a third makes 300 s, no more; after the third, a fourth would make 400.
        (SaveClock(None, 5), [100] * 7, 0, [3, 6]),
        (SaveClock(None, 5), [1] * 900, 0, [300, 600, 900]),
        (SaveClock(None, 5), [400] * 3, 0, [1, 2, 3]),  # longer than that: after each
        (SaveClock(None, 5), [10] * 20, 0, []),
        (SaveClock(4, 5), [100] * 8, 0, [3, 4, 7, 8]),
        (SaveClock(4, None), [1000] * 8, 0, [4, 8]),
        (SaveClock(None, None), [1000] * 8, 0, []),
        # A save of 60 s after every 5 minutes would be a fifth of the time; after 20 minutes it is 5%.
        (SaveClock(None, 5), [100] * 40, 60, [3, 15, 27, 39]),
    ],
)
def test_a_run_is_saved_by_iterations_and_by_time_and_rarely_if_that_takes_long(clock, lengths, cost_s, found):
    assert saves(clock, lengths, cost_s) == found


def versions(run: Path) -> list[int]:
    return sorted(int(path.name[1:]) for path in (run / "checkpoints").glob("v*"))


def evaluated(run: Path, name: str, rate: float | None, total: float) -> None:
    folder = run / "eval" / name
    folder.mkdir(parents=True)
    success = None if rate is None else {"rate": rate}
    overall = {"success_once": success, "return": total}
    (folder / "results.json").write_text(json.dumps({"overall": overall}))


def test_the_newest_checkpoints_stay_and_the_best_and_what_was_asked_for_by_hand(tmp_path):
    for version in range(1, 9):
        write(tmp_path, version)
    evaluated(tmp_path, "v000001", 0.5, 9.0)
    evaluated(tmp_path, "v000002", 0.9, 1.0)  # the best
    evaluated(tmp_path, "v000003", 0.9, 0.5)
    evaluated(tmp_path, "v000004-evaluate-2", 0.0, 0.0)
    prune(tmp_path, 8, keep=2)
    assert versions(tmp_path) == [2, 4, 7, 8]
    assert newest(tmp_path).name == "v000008"


def test_without_a_success_the_return_decides_which_is_the_best(tmp_path):
    for version in range(1, 5):
        write(tmp_path, version)
        evaluated(tmp_path, f"v{version:06d}", None, -abs(version - 2.0))
    prune(tmp_path, 4, keep=1)
    assert versions(tmp_path) == [2, 4]


def test_pruning_keeps_folders_that_we_did_not_write(tmp_path):
    for version in range(1, 7):
        write(tmp_path, version)
    parent = tmp_path / "checkpoints"
    (parent / "v000001" / "notes.txt").write_text("the one of the paper")
    (parent / "v000002").rename(parent / "v000002-good")
    (parent / "v000003").rename(tmp_path / "elsewhere")
    (parent / "v000003").symlink_to(tmp_path / "elsewhere")
    (parent / "v000004" / "manifest.json").write_text("{")
    prune(tmp_path, 6, keep=1)
    left = {path.name for path in parent.iterdir()}
    assert left == {"v000001", "v000002-good", "v000003", "v000004", "v000006", "latest"}
    assert (tmp_path / "elsewhere" / "manifest.json").is_file()


def test_damaged_checkpoints_of_a_later_version_do_not_displace_the_one_that_was_just_written(tmp_path):
    for version in (5, 8, 9):
        write(tmp_path, version)
    for version in (8, 9):
        (tmp_path / "checkpoints" / f"v{version:06d}" / "state.json").unlink()
    write(tmp_path, 6)
    prune(tmp_path, 6, keep=1)
    assert newest(tmp_path).name == "v000006" and versions(tmp_path) == [6, 8, 9]


def test_half_written_checkpoints_of_a_killed_run_are_removed_by_the_next_save(tmp_path):
    write(tmp_path, 1)
    for name in (".writing-v000002", ".removing-v000000"):
        (tmp_path / "checkpoints" / name / "policy").mkdir(parents=True)
    prune(tmp_path, 1, keep=3)
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"v000001", "latest"}


@pytest.mark.parametrize("has_checksums", [True, False])
def test_the_policy_folder_of_a_checkpoint_is_checked_too_where_it_is_named_alone(tmp_path, has_checksums):
    def fill(folder):
        make_policy(MLPConfig(hidden=(8,)), EnvSpec(ActionSpec(2), state_dim=4), 0).save_pretrained(folder / "policy")
        if not has_checksums:  # of an older version
            (folder / "policy" / "checksums.json").unlink()

    saved = write_checkpoint(tmp_path / "checkpoints", 1, fill, state_of(1), {})
    verify(saved)
    assert find(str(saved / "policy")).spec.state_dim == 4
    path = saved / "policy" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    for load in (find, load_policy):
        with pytest.raises(CheckpointError, match=r"policy is damaged: model\.safetensors does not match its checksum"):
            load(str(saved / "policy"))


@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_a_run_of_205c5498_goes_on_and_is_evaluated(name, tmp_path):
    """Two iterations of a point mass on 27 November, before the house was rebuilt; GRPO that may carry groups over."""
    run = tmp_path / name
    shutil.copytree(Path(__file__).parents[1] / "support/old_runs" / name, run)
    asked = [f"resume={run}", "run.iterations=3", "cluster.backend=inline", "eval.episodes=2", "eval.videos=0"]
    assert train(asked) == 0
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [1, 2, 3] and rows[2]["env_steps"] > rows[1]["env_steps"]
    before, after = (load_policy(run / "checkpoints" / version / "policy") for version in ("v000002", "v000003"))
    assert any(not torch.equal(old, new) for old, new in zip(before.parameters(), after.parameters(), strict=True))
    assert (run / "eval/v000003/results.json").is_file()
