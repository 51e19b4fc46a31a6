import errno
import itertools
import json
import os
from pathlib import Path

import numpy as np
import pytest

from embodied import checkpoints
from embodied.checkpoints import locate, newest, read_sims, verify, write_checkpoint
from embodied.errors import CheckpointError


def fill(folder: Path) -> None:
    (folder / "policy").mkdir()
    (folder / "policy" / "config.json").write_text("{}")
    (folder / "policy" / "model.safetensors").write_bytes(b"x" * 1000)


def write(run: Path, version: int) -> Path:
    (run / "run.json").write_text("{}")
    return write_checkpoint(run / "checkpoints", version, fill, {"version": version}, {"rows.length": np.arange(3)})


def test_a_checkpoint_comes_back_as_it_was_written(tmp_path):
    path = write(tmp_path, 7)
    assert path.name == "v000007"
    assert verify(path) == {"version": 7}
    assert read_sims(path)["rows.length"].tolist() == [0, 1, 2]
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
                write_checkpoint(tmp_path / "checkpoints", 2, fill, {"version": 2}, {"a": np.zeros(2)})
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


def test_latest_is_only_a_hint(tmp_path):
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
    assert checkpoints.name_of(3) == "v000003"


@pytest.mark.parametrize("manifest", ["[]", "{}", '{"files": []}', '{"files": {}}', "null", "{"])
def test_a_manifest_that_lists_nothing_proves_nothing(tmp_path, manifest):
    first, second = write(tmp_path, 1), write(tmp_path, 2)
    (second / "manifest.json").write_text(manifest)
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        verify(second)
    assert newest(tmp_path) == first


def test_a_damaged_checkpoint_is_replaced_when_its_version_is_saved_again(tmp_path):
    path = write(tmp_path, 3)
    (path / "policy" / "model.safetensors").write_bytes(b"y" * 1000)
    assert verify(write(tmp_path, 3)) == {"version": 3}


def test_falling_back_to_an_older_checkpoint_is_said(tmp_path, capsys):
    write(tmp_path, 1)
    (write(tmp_path, 2) / "manifest.json").unlink()
    newest(tmp_path)
    assert "v000002/manifest.json cannot be read" in (said := capsys.readouterr().err)
    assert "using v000001" in said
