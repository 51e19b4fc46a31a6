"""TensorBoard reads what we wrote, and the driver stays free of torch."""

import subprocess
import sys

import pytest

from embodied.reporting.progress import TensorBoardLogger, in_folders


def test_every_number_of_an_iteration_is_a_point_of_a_curve(tmp_path):
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    curves = TensorBoardLogger(tmp_path / "tensorboard")
    curves.add(128, in_folders({"return": 1.5, "train/lr": 0.25, "success_once": None}))
    curves.add(256, in_folders({"return": 2.0}))
    curves.close()
    (path,) = (tmp_path / "tensorboard").iterdir()
    first, *rest = EventFileLoader(str(path)).Load()
    points = [(event.step, v.tag, pytest.approx(v.tensor.float_val[0])) for event in rest for v in event.summary.value]
    assert first.file_version == "brain.Event:2"
    assert points == [(128, "run/return", 1.5), (128, "train/lr", 0.25), (256, "run/return", 2.0)]


def test_writing_them_imports_neither_torch_nor_tensorflow(tmp_path):
    program = (
        "import sys, embodied.train; from pathlib import Path\n"
        "from embodied.reporting.progress import TensorBoardLogger\n"
        "TensorBoardLogger(Path(sys.argv[1])).add(1, {'a': 1.0}); print({'torch', 'tensorflow'} & set(sys.modules))"
    )
    told = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    assert told.stdout == "set()\n"
