"""Camera images of MuJoCo scenes, equal pixel for pixel to robosuite's and LIBERO's own.

OpenGL comes from EGL (a graphics card's, or Mesa's software renderer) or OSMesa; every thread has one context, in which
each scene keeps its meshes and textures. A frame shows the arrays of `Row.shown`, so it can be drawn after the
simulation has continued.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from embodied.core.errors import ConfigError
from embodied.core.vulkan_driver import loads

ARRAYS = ("geom_xpos", "geom_xmat", "site_xpos", "site_xmat", "cam_xpos", "cam_xmat", "light_xpos", "light_xdir")
SHOWN = (*ARRAYS, "site_rgba")
MAX_GEOMS = 1000  # of a drawn scene, robosuite's number
LIBRARIES = {"egl": ("libEGL.so.1", "libGL.so.1"), "osmesa": ("libOSMesa.so.8",)}
MESA = "/usr/share/glvnd/egl_vendor.d/50_mesa.json"  # EGL's description of Mesa's driver
PACKAGES = "libegl1 libgl1 libegl-mesa0 libgl1-mesa-dri (or libosmesa6)"

_mine = threading.local()


def opengl() -> str:
    """`egl` or `osmesa`: MUJOCO_GL if it is set, else the one on this machine. ConfigError if it has neither."""
    chosen = os.environ.get("MUJOCO_GL", "").strip().lower()
    if chosen in LIBRARIES:
        return chosen
    for kind, libraries in LIBRARIES.items():
        if all(loads(library) for library in libraries):
            return kind
    raise ConfigError(
        "MuJoCo's images need OpenGL without a screen, and this machine has neither EGL nor OSMesa. "
        f"Install the system packages {PACKAGES}: sudo apt-get install {PACKAGES.partition(' (')[0]}"
    )


def opengl_problem() -> str:
    """Why nothing can be drawn here; empty if images can be drawn."""
    try:
        opengl()
    except ConfigError as err:
        return str(err)
    return ""


def make_current() -> None:
    """This thread's OpenGL context, made on first use."""
    if getattr(_mine, "context", None) is None:
        if opengl() == "egl":
            choose_card()
            from mujoco.egl import GLContext
        else:
            from mujoco.osmesa import GLContext
        context = GLContext(640, 480)
        atexit.register(context.free)  # before the display is closed, or its destructor complains
        _mine.context = context
    _mine.context.make_current()


def free_context() -> None:
    """Free this thread's OpenGL context, whose painters are closed."""
    if context := getattr(_mine, "context", None):
        atexit.unregister(context.free)
        context.free()
        _mine.context = None


def draw_on_cores() -> None:
    """Let this process draw by software, before it has a context: through OSMesa, or Mesa's EGL without a card."""
    os.environ.pop(CHOICE, None)
    if loads(*LIBRARIES["osmesa"]):
        os.environ["MUJOCO_GL"] = "osmesa"
    else:
        os.environ |= {"MUJOCO_GL": "egl", "LIBGL_ALWAYS_SOFTWARE": "1", "__EGL_VENDOR_LIBRARY_FILENAMES": MESA}


def renderer_name() -> str:
    """OpenGL's name of what draws: `NVIDIA H200/PCIe/SSE2`, or `llvmpipe (LLVM 15.0.6, 256 bits)`."""
    make_current()
    from OpenGL import GL

    return GL.glGetString(GL.GL_RENDERER).decode()


class Row(Protocol):
    """One env row's simulation."""

    data: Any  # robosuite's
    shown: dict[str, np.ndarray]  # the arrays of its last observation


class Scene(Protocol):
    """A model and the rows that share it."""

    model: Any  # MuJoCo's

    def attach(self, row: Any) -> None:
        """Let the model describe this row."""


def current(scene: Scene, row: Row) -> dict[str, np.ndarray]:
    """`SHOWN` of a row's current state."""
    scene.attach(row)
    now = {name: getattr(row.data._data, name) for name in ARRAYS}
    return {**now, "site_rgba": scene.model.site_rgba.copy()}


class Painter:
    """Draws the rows of one scene."""

    def __init__(self, scene: Scene, largest: int, fast: bool, cameras: Mapping[str, str]) -> None:
        """`cameras`: MuJoCo's names of the cameras, by ours."""
        import mujoco

        self._mujoco = mujoco
        make_current()
        model = scene.model
        if fast:
            model.vis.quality.offsamples = 0
        self.largest = largest
        self._scene = scene
        self._data = mujoco.MjData(model)
        self._drawn = mujoco.MjvScene(model, maxgeom=MAX_GEOMS)
        if fast:
            self._drawn.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = 0
        self._options = mujoco.MjvOption()
        self._options.geomgroup[0] = 0  # collision shapes
        self._options.geomgroup[1] = 1
        self._camera = mujoco.MjvCamera()
        self._camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
        camera_id = lambda name: mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_CAMERA, name)  # noqa: E731
        self._cameras = {name: camera_id(theirs) for name, theirs in cameras.items()}
        self._nudge = mujoco.MjvPerturb()
        room = model.vis.global_
        room.offwidth, room.offheight = max(room.offwidth, largest), max(room.offheight, largest)
        self._context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_150)

    def paint(self, row: Row, camera: str, side: int) -> np.ndarray:
        """uint8 [side, side, 3], upright: the row's last observation."""
        return self._draw(row.shown, camera, side)

    def paint_now(self, row: Row, camera: str, side: int) -> np.ndarray:
        """An image of the current state, for videos."""
        return self._draw(current(self._scene, row), camera, side)

    def _draw(self, shown: dict[str, np.ndarray], camera: str, side: int) -> np.ndarray:
        mujoco, model = self._mujoco, self._scene.model
        make_current()
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)
        for name in ARRAYS:
            getattr(self._data, name)[:] = shown[name]
        self._camera.fixedcamid = self._cameras[camera]
        before = model.site_rgba.copy()
        model.site_rgba[:] = shown["site_rgba"]
        everything = mujoco.mjtCatBit.mjCAT_ALL
        mujoco.mjv_updateScene(model, self._data, self._options, self._nudge, self._camera, everything, self._drawn)
        model.site_rgba[:] = before
        view = mujoco.MjrRect(0, 0, side, side)
        mujoco.mjr_render(view, self._drawn, self._context)
        frame = np.empty((side, side, 3), np.uint8)
        mujoco.mjr_readPixels(frame, None, view, self._context)
        return frame[::-1]  # OpenGL counts rows from below

    def close(self) -> None:
        make_current()
        self._context.free()


# EGL has its own order of devices, including software renderers. A card is found by the file of its PCI address, such
# as /dev/dri/renderD128. Containers often have no such file: there NVIDIA's EGL tells the CUDA number of a device, and
# the only card that CUDA shows this process, by its UUID, has number 0.

CHOICE = "MUJOCO_EGL_DEVICE_ID"  # read by MuJoCo; until then it holds the card's place by PCI address
MOST = 10  # devices, as MuJoCo looks at no more
RENDER_NODE_FILE = 0x3377  # EGL_DRM_RENDER_NODE_FILE_EXT
CUDA_DEVICE = 0x323A  # EGL_CUDA_DEVICE_NV


def choose_card() -> None:
    """Set MuJoCo's device to the GPU of EMBODIED_RENDER_FILE, or to the GPU that CUDA shows. If EGL knows neither,
    choose by index: NVIDIA's devices come first, by PCI address. If there are fewer devices, as in containers without
    the driver's graphics part, another device renders."""
    if (place := os.environ.get(CHOICE)) is None:
        return
    devices, wanted = egl_devices(), os.environ.get("EMBODIED_RENDER_FILE", "")
    files, numbers = [file for file, _ in devices], [number for _, number in devices]
    if wanted and wanted in files:
        os.environ[CHOICE] = str(files.index(wanted))
    elif numbers.count(0) == 1:
        os.environ[CHOICE] = str(numbers.index(0))
    elif int(place) >= len(files):
        print(f"EGL has no device {place} ({wanted or 'no file known'}): another one renders", file=sys.stderr)
        del os.environ[CHOICE]


def egl_devices() -> list[tuple[str, int | None]]:
    """Files and CUDA numbers of EGL's devices in their order; "" and None where a device has none."""
    egl = ctypes.CDLL("libEGL.so.1")
    egl.eglGetProcAddress.restype, egl.eglGetProcAddress.argtypes = ctypes.c_void_p, [ctypes.c_char_p]

    def function(name: bytes, result: type, *arguments: type):
        address = egl.eglGetProcAddress(name)
        return ctypes.CFUNCTYPE(result, *arguments)(address) if address else None

    pointers, number = ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_int)
    query = function(b"eglQueryDevicesEXT", ctypes.c_uint, ctypes.c_int, pointers, number)
    text = function(b"eglQueryDeviceStringEXT", ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int)
    devices, count = (ctypes.c_void_p * MOST)(), ctypes.c_int()
    if query is None or text is None or not query(MOST, devices, ctypes.byref(count)):
        return []
    ask = function(b"eglQueryDeviceAttribEXT", ctypes.c_uint, ctypes.c_void_p, ctypes.c_int, pointers)

    def cuda_number(device: int) -> int | None:
        value = ctypes.c_void_p()
        answered = ask is not None and ask(device, CUDA_DEVICE, ctypes.byref(value))
        return (value.value or 0) if answered else None

    files = [(text(device, RENDER_NODE_FILE) or b"").decode().rpartition("/")[2] for device in devices[: count.value]]
    return [(file, cuda_number(device)) for file, device in zip(files, devices)]
