"""Pictures by Warp: the drawing process with a stand-in anywhere, Warp itself where it is installed."""

import importlib.util
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from embodied.envs import env_class
from embodied.envs.interpreter import env as interpreter
from embodied.envs.interpreter import locked
from embodied.envs.interpreter.env import ProcessDied
from embodied.envs.libero import drawing
from embodied.envs.libero.config import LiberoConfig
from embodied.envs.mujoco.rendering import ARRAYS, Painter

mujoco = pytest.importorskip("mujoco")
needs_warp = pytest.mark.skipif(importlib.util.find_spec("mujoco_warp") is None, reason="needs mujoco-warp")
XML = """
<mujoco>
  <asset>
    <texture name="cube" type="cube" builtin="gradient" width="64" height="64" rgb1="1 0 0" rgb2="0 0 1"/>
    <texture name="flat" type="2d" builtin="checker" width="64" height="64" rgb1=".2 .3 .4" rgb2=".8 .8 .7"/>
    <texture name="sky" type="skybox" builtin="gradient" width="32" height="192" rgb1=".6 .8 1" rgb2=".1 .1 .1"/>
    <material name="cube" texture="cube"/>
    <material name="flat" texture="flat" texrepeat="5 5" texuniform="true"/>
    <material name="mirror" rgba=".8 .8 .8 1" reflectance=".4"/>
  </asset>
  <worldbody>
    <light pos="0 -1 3" dir="0 .3 -1" castshadow="false"/>
    <geom type="plane" size="2 2 .1" material="flat" group="1"/>
    <geom type="box" size=".2 .3 .1" pos="0 0 .2" euler="10 20 30" material="cube" group="1"/>
    <geom type="box" size=".3 .3 .02" pos=".6 0 .02" material="mirror" group="1"/>
    <geom type="cylinder" size=".1 .2" pos="-.5 .1 .2" rgba=".2 .7 .3 1" group="1"/>
    <geom type="sphere" size=".15" pos=".5 .4 .15" rgba=".7 .6 .1 .5" group="1"/>
    <geom type="capsule" size=".08 .15" pos="-.4 -.5 .1" euler="0 90 20" rgba=".6 .2 .6 1" group="1"/>
    <geom type="box" size=".1 .1 .1" pos="0 -1 .5" group="0"/>
    <site type="sphere" size=".05" pos="0 -.4 .3" rgba="1 0 0 1"/>
    <camera name="front" pos="0 -1.6 1.2" xyaxes="1 0 0 0 .6 .8" fovy="45"/>
  </worldbody>
</mujoco>
"""


class Still:
    """Stands for `Pictures` in the drawing process: each picture has the brightness of the first light's height."""

    made = 0

    def __init__(self, model, device):
        self.pid, self.images = os.getpid(), model["images"]
        Still.made += 1

    def about(self):
        return [self.pid, Still.made]

    def draw(self, shown, cameras, side):
        if shown["site_rgba"].max() > 8:  # a picture that kills
            os.kill(self.pid, signal.SIGKILL)
        heights = shown["light_xpos"][:, 0, 2].astype(np.uint8)
        return np.broadcast_to(heights[:, None, None, None, None], (len(heights), len(cameras), side, side, 3)).copy()


class Scene:
    def __init__(self):
        self.model = mujoco.MjModel.from_xml_string(XML)
        self.data = mujoco.MjData(self.model)
        mujoco.mj_forward(self.model, self.data)

    def shown(self, **changed):
        now = {name: np.array(getattr(self.data, name)) for name in ARRAYS}
        return now | {"site_rgba": self.model.site_rgba.copy()} | changed


@pytest.fixture
def drawer(monkeypatch):
    monkeypatch.setattr(drawing, "is_here", lambda: False)
    monkeypatch.setattr(drawing, "PICTURES", f"{Path(__file__).stem}:Still")
    monkeypatch.setattr(locked, "python_of", lambda name: __import__("sys").executable)
    monkeypatch.syspath_prepend(Path(__file__).parent)
    made = drawing.Drawer(LiberoConfig(name="libero", renderer="warp"))
    yield made
    if made._process:
        made._process.end()


def test_a_drawing_process_that_is_killed_is_replaced_and_knows_the_models_again(drawer, capfd):
    one, other = Scene(), Scene()
    rows = [one.shown(), one.shown(light_xpos=np.full((1, 3), 7.0))]
    frames = drawer.draw(one, rows, [0, 0], 16)
    assert frames.shape == (2, 2, 16, 16, 3) and [*frames[:, 0, 0, 0, 0]] == [3, 7]
    assert drawer.draw(other, [other.shown()], [0], 8).mean() == 3
    first = drawer._process.process.pid
    os.kill(first, signal.SIGKILL)
    np.testing.assert_array_equal(drawer.draw(one, rows, [0, 0], 16), frames)
    assert drawer._process.process.pid != first and drawer.draw(other, [other.shown()], [0], 8).mean() == 3
    assert "env.renderer=warp: its process died with signal 9; another one draws" in capfd.readouterr().err


def test_drawers_on_a_gpu_share_a_process_and_its_models(drawer, monkeypatch, tmp_path, capfd):
    monkeypatch.setenv("EMBODIED_RENDER", "0")
    monkeypatch.setattr(interpreter, "socket_folder", lambda: tmp_path)
    monkeypatch.setattr(interpreter, "STARTED", [])
    card, same, scene = (*(drawing.Drawer(drawer.config) for _ in range(2)), Scene())
    frames = [each.draw(scene, [scene.shown()], [0], 8) for each in (card, same)]
    np.testing.assert_array_equal(*frames)
    (process,) = interpreter.STARTED
    assert [each._process.call("call", 0, "about", ()) for each in (card, same)] == [[process.pid, 1]] * 2
    monkeypatch.setenv("EMBODIED_RENDER", "1")
    other = drawing.Drawer(drawer.config)
    other.draw(scene, [scene.shown()], [0], 8)
    assert len(interpreter.STARTED) == 2
    os.kill(process.pid, signal.SIGKILL)
    monkeypatch.setenv("EMBODIED_RENDER", "0")
    for each in (card, same):
        np.testing.assert_array_equal(each.draw(scene, [scene.shown()], [0], 8), frames[0])
    assert len([each for each in interpreter.STARTED if each.poll() is None]) == 2
    assert capfd.readouterr().err.count("another one draws") == 2
    for each in (card, same, other):
        each._process.end()
    assert [each.wait(60) for each in interpreter.STARTED[-2:]] == [0, 0]


def test_a_picture_that_kills_two_drawing_processes_is_an_error(drawer):
    scene = Scene()
    with pytest.raises(ProcessDied, match=r"env\.renderer=warp: its process died with signal 9"):
        drawer.draw(scene, [scene.shown(site_rgba=np.full((1, 4), 9.0))], [0], 8)


def test_a_result_of_warp_s_pictures_is_named_after_them_and_one_of_states_is_not():
    names = {}
    for cameras in ((), ("wrist",)):
        config = LiberoConfig(name="libero", renderer="warp", cameras=cameras)
        protocol = env_class(config).protocols(config)[0]
        names[cameras] = protocol.name.replace("+mujoco3.10.0", "")
        assert ("Warp draws" in protocol.rules) == bool(cameras)
    assert names == {(): "libero-v1", ("wrist",): "libero-v1+warp-pictures"}


@needs_warp
def test_warp_s_picture_nearly_equals_mujoco_s():
    scene, side = Scene(), 64
    rows = [scene.shown(), scene.shown(site_rgba=np.zeros((1, 4)))]
    frames = drawing.Drawer(LiberoConfig(name="libero")).draw(scene, rows, [0], side)[:, 0]
    painter = Painter(scene, side, False, {"front": "front"})
    for row, frame in zip(rows, frames, strict=True):
        expected = painter.paint(SimpleNamespace(shown=row), "front", side)
        assert np.abs(expected.astype(int) - frame).mean() < 3.0
    assert np.abs(frames[0].astype(int) - frames[1]).mean() > 0.1  # the marker is gone
    painter.close()
