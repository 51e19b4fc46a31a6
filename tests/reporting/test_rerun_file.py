"""An episode as a file of Rerun."""

import sys

import numpy as np
import pytest
from written_datasets import SPEC, write_new
from written_runs import played, write_evaluation

from embodied.core.options import Requirement
from embodied.report import main


@pytest.fixture
def evaluation(tmp_path):
    """Four episodes, of which the second has an error; the others have 6, 9 and 7 recorded steps."""
    episodes = played([1, 0, 0, 1])
    episodes[1] = played([0], seed=1, error="gone")[0]
    folder = write_evaluation(tmp_path / "v000005", episodes)
    write_new(folder / "dataset", SPEC)
    return folder


@pytest.mark.parametrize(
    ("words", "without", "told"),
    [
        (["--rerun=0"], "no-rerun", "--rerun needs no-rerun, which is not installed"),
        (["--rerun=x"], "", "the number of an episode"),
        (["--rerun=9"], "", "has no episode 9"),
        (["--rerun=1"], "", "neither a video nor recorded steps"),
    ],
)
def test_an_episode_that_cannot_be_written_is_refused(words, without, told, evaluation, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rerun", sys.modules.get("rerun", sys))
    monkeypatch.setattr("embodied.report.RERUN_SDK", Requirement((without,) if without else ()))
    assert main([str(evaluation), *words]) == 2
    assert told in capsys.readouterr().err


def test_the_file_has_every_step_of_its_episode(evaluation, capsys):
    rerun = pytest.importorskip("rerun")
    assert main([str(evaluation), "--rerun=2"]) == 0
    recording = rerun.dataframe.load_recording(capsys.readouterr().out.strip())
    steps = recording.view(index="step", contents="/**").select().read_all()
    assert len(steps["/action:Scalar"]) == 9 and all(len(row) == 2 for row in steps["/action:Scalar"])
    assert np.isfinite([row[0].as_py() for row in steps["/reward:Scalar"]]).all()
