"""`doctor`'s tests in separate processes: python -m embodied.system.probes NAME. The last line is JSON.

Each probe uses the code of a run, so its result holds for runs.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

MOST_DRAWERS = 8  # of a GPU
PR_SET_PDEATHSIG = 1
FLAT = 1.0  # a frame with a smaller deviation of grey values is blank


def torch() -> dict[str, Any]:
    """Multiply matrices on every device torch finds."""
    import torch

    devices = ["cpu", *[f"cuda:{i}" for i in range(torch.cuda.device_count())]]
    for device in devices:
        ones = torch.ones(64, 64, device=device)
        if float((ones @ ones).sum()) != 64.0**3:
            raise SystemExit(f"torch computes wrong sums on {device}")
    names = [torch.cuda.get_device_name(device) for device in devices[1:]]
    return {"version": torch.__version__, "gpus": names, "built_for": torch.version.cuda}


def frame(kind: str) -> dict[str, Any]:
    """Make an env of this kind, begin an episode and render a frame."""
    import numpy as np
    from pydantic import TypeAdapter

    from embodied.core.types import EpisodeList
    from embodied.envs import make_env
    from embodied.envs.config import EnvConfig

    config = TypeAdapter(EnvConfig).validate_python({"name": kind, "num_envs": 1})
    env = make_env(config, 1)
    if problem := env.video_problem():
        raise SystemExit(problem)
    env.reset(options={"reset_mask": np.array([True]), "episodes": EpisodeList(0, "eval", env.tasks(config)).first(1)})
    drawn = env.render_rows(np.array([0]))[0]
    env.close()
    if drawn.std() < FLAT:
        raise SystemExit(f"the frame of {config.task} is blank")
    return {"task": config.task, "size": list(drawn.shape[:2]), "backend": env.env_spec.backend}


def renderer() -> dict[str, Any]:
    """Test whether SAPIEN can render on the GPU: a CUDA driver without its graphics part cannot."""
    from embodied.core.vulkan_driver import ensure_vulkan

    ensure_vulkan()
    import sapien

    device = sapien.Device("cuda")
    return {"name": device.name, "draws": device.can_render()}


def mujoco() -> dict[str, Any]:
    """Render a box without a screen, as LIBERO does."""
    import mujoco

    box = "<geom type='box' size='.2 .2 .2' rgba='1 0 0 1'/>"
    model = mujoco.MjModel.from_xml_string(f"<mujoco><worldbody><light pos='0 0 2'/>{box}</worldbody></mujoco>")
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    with mujoco.Renderer(model, 64, 64) as renderer:
        renderer.update_scene(data)
        drawn = renderer.render()
    if drawn.std() < FLAT:
        raise SystemExit("MuJoCo's frame is blank")
    return {"through": os.environ.get("MUJOCO_GL", "")}


def drawing(kind: str) -> dict[str, Any]:
    """Probe whether this kind of simulator draws on GPUs while they compute, in a process per core, and remember it."""
    from embodied.envs.config import ENV_CONFIGS
    from embodied.run.devices import cores, discover, seats_on
    from embodied.system import drawing

    follow_parent()
    env, cards = ENV_CONFIGS[kind](name=kind), discover().nodes[0].gpus
    seats = seats_on(cards, min(len(cores()), MOST_DRAWERS * len(cards)))
    return dataclasses.asdict(drawing.record(env, seats, drawing.probe(env, seats)))


def draw(folder: str, name: str) -> dict[str, Any]:
    """Play an env's first decisions again and again until the file `stop` exists, and write a line about every picture
    (`drawing.py`). Without software's pictures to compare with, these are drawn and stored."""
    follow_parent()
    import numpy as np

    from embodied.envs import make_env
    from embodied.system import drawing

    at, lines = Path(folder), (Path(folder) / f"{name}.lines").open("w", buffering=1)
    stored, stop = at / "pictures.npy", at / "stop"
    expected = np.load(stored) if stored.exists() else None
    env = make_env(drawing.read_env(at, expected is None), 1)
    by = env.drawn_by()
    print(json.dumps({"by": by}), file=lines)
    while not stop.exists():
        pictures: list[np.ndarray] = []
        for picture, seconds in drawing.pictures(env):
            off, fault = drawing.judge(picture, pictures, expected)
            pictures.append(picture)
            print(json.dumps({"by": by, "s": seconds, "off": off, "fault": fault}), file=lines)
            if stop.exists():
                break
        if expected is None:
            np.save(stored, np.stack(pictures))
            break
    env.close()
    return {}


def multiply(folder: str, name: str) -> dict[str, Any]:
    """Multiply matrices until the file `stop` exists, on the GPU if there is one, and write a line about every sum."""
    follow_parent()
    import torch

    at, lines = Path(folder), (Path(folder) / f"{name}.lines").open("w", buffering=1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    factors = torch.ones((8192, 8192) if device == "cuda" else (256, 256), device=device)
    print(json.dumps({"by": device}), file=lines)
    while not (at / "stop").exists():
        for _ in range(10):
            product = factors @ factors
        fault = "" if float(product[0, 0]) == len(factors) else "a wrong product"
        print(json.dumps({"fault": fault}), file=lines)
    return {}


def follow_parent() -> None:
    """Let the kernel end this process with its parent, even if a driver hangs; end it now if the parent is gone."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.environ.get("EMBODIED_PARENT", str(os.getppid())) != str(os.getppid()):
        raise SystemExit("the process that asked for this probe has ended")


def scoring(kind: str) -> dict[str, Any]:
    """Score a right and a wrong answer as the text envs of this kind do."""
    from embodied.envs import plugin
    from embodied.envs.text.scoring_process import Scorer

    process, right, question = plugin(kind).scored_example()
    scorer = Scorer(process)
    try:
        scores = [scorer.score(60.0, answer=answer, **question) for answer in (right, "elephant")]
    finally:
        scorer.close()
    if scores != [(1.0, ""), (0.0, "")]:
        raise SystemExit(f"a right and a wrong answer were scored {scores}")
    return {"scored": len(scores)}


def video() -> dict[str, Any]:
    """Write two frames to an mp4."""
    import numpy as np

    from embodied.records.videos import VideoWriter

    with tempfile.TemporaryDirectory() as folder, VideoWriter(Path(folder), fps=2) as writer:
        for shade in (0, 255):
            writer.add(np.full((64, 64, 3), shade, np.uint8))
        return {"bytes": writer.finish("two-frames.mp4").stat().st_size}


def ray() -> dict[str, Any]:
    """Start Ray on this machine and run a task in one of its processes."""
    import ray

    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, _temp_dir=tempfile.gettempdir())
    try:
        answer = ray.get(ray.remote(process_id).remote(), timeout=120)
    finally:
        ray.shutdown()
    if answer == os.getpid():
        raise SystemExit("Ray ran the task in the calling process")
    return {"version": ray.__version__}


def process_id() -> int:
    return os.getpid()


def tasks(kind: str) -> dict[str, Any]:
    """The tasks of this kind of simulator, with each one's missing downloads."""
    from embodied.envs import plugin

    return {**plugin(kind).list_tasks()}


PROBES: dict[str, Callable[..., dict[str, Any]]] = {
    probe.__name__: probe
    for probe in (torch, frame, renderer, mujoco, drawing, draw, multiply, scoring, video, ray, tasks)
}


if __name__ == "__main__":
    print(json.dumps(PROBES[sys.argv[1]](*sys.argv[2:])))
