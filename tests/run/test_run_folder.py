"""The run's folder: never overwritten, and readable whatever happened."""

import json
import shutil
from types import SimpleNamespace

import pytest

from embodied.core.errors import CheckpointError, ConfigError
from embodied.run import run_folder
from embodied.run.ending import Interruption, closing
from embodied.run.run_folder import RunFolder
from embodied.train import print_workflow_line


def row(iteration):
    return {"iteration": iteration, "env_steps": 10 * iteration}


def test_two_runs_of_one_second_get_folders_of_their_own(tmp_path):
    first, second = (RunFolder.create(tmp_path, "toy", "seed: 0\n") for _ in range(2))
    assert first.path != second.path


@pytest.mark.parametrize("name", ["file", "file/below", "link", "loop", "x" * 300])
def test_a_run_dir_that_cannot_hold_a_run_is_the_users_mistake(tmp_path, name):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ConfigError, match="no folder can be made there"):
        RunFolder.create(tmp_path / name, "toy", "")


def test_no_file_of_a_run_is_a_program(tmp_path):
    folder = RunFolder.create(tmp_path, "toy", "")
    assert not [path for path in folder.path.rglob("*") if path.is_file() and path.stat().st_mode & 0o111]


def test_a_resumed_run_makes_the_metrics_after_its_checkpoint_again(tmp_path):
    folder = RunFolder.create(tmp_path, "toy", "")
    for iteration in (1, 2, 3):
        folder.log.row(row(iteration))
    folder.finish("stopped")
    with (folder.path / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 4, "env')  # the line a killed run was writing
    again = RunFolder.reopen(folder.path)
    again.log.keep_rows(2)
    again.log.row(row(3))
    again.finish("finished")
    lines = (folder.path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == [1, 2, 3]
    assert again.info()["state"] == "finished" and len(again.info()["resumed"]) == 1


def test_a_folder_that_was_removed_is_named_and_hides_no_cause(tmp_path, capsys):
    folder = RunFolder.create(tmp_path, "toy", "")
    shutil.rmtree(folder.path)
    with pytest.raises(FileNotFoundError), closing(folder, Interruption(), print):
        folder.log.note("iteration 1")
    assert f"{folder.path} was removed" in capsys.readouterr().err


def test_a_run_that_goes_on_is_not_continued_by_another(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "ENDING_S", 0.0)
    folder = RunFolder.create(tmp_path, "toy", "")
    before = folder.info()
    with pytest.raises(CheckpointError, match="going on in another process"):
        RunFolder.reopen(folder.path)
    assert folder.info() == before
    folder.finish("stopped")
    RunFolder.reopen(folder.path).finish("finished")


def test_a_run_whose_process_is_ending_is_continued_after_a_wait(tmp_path, monkeypatch, capsys):
    folder = RunFolder.create(tmp_path, "toy", "")
    monkeypatch.setattr(run_folder.time, "sleep", lambda seconds: folder.finish("stopped"))
    RunFolder.reopen(folder.path).finish("finished")
    assert f"{folder.path}: another process still runs it; waiting 10 s for its end" in capsys.readouterr().out


def test_lines_that_a_crash_has_broken_are_dropped_from_the_metrics(tmp_path):
    folder = RunFolder.create(tmp_path, "toy", "")
    folder.log.row(row(1))
    folder.finish("stopped")
    path = folder.path / "metrics.jsonl"
    with path.open("ab") as file:
        file.write(b'{"iteration": 2, "a":\n}\n{}\n[]\n\xff\x00}\n')
    folder.log.keep_rows(5)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [row(1)]


def test_a_warning_of_a_workflow_is_said_and_counts_no_restart(tmp_path):
    folder, said = RunFolder.create(tmp_path, "toy", ""), []
    for line in ("sim-0 is started again (restart 1)", "warning: 3 of 8 conversations count for nothing"):
        print_workflow_line(folder, SimpleNamespace(say=said.append), line)
    assert folder.info()["restarts"] == 1 and len(said) == 2
    folder.finish("finished")
