"""Which of EGL's devices is the GPU that a simulator shall draw on.

EGL counts devices in an order of its own, software renderers among them, and does not know CUDA's numbers. What both
know is the file through which the system reaches a card, /dev/dri/renderD128 for one.
"""

from __future__ import annotations

import ctypes
import os
import sys

CHOICE = "MUJOCO_EGL_DEVICE_ID"  # where MuJoCo looks; before, the card's place by PCI address
MOST = 10  # devices, as MuJoCo looks at no more
RENDER_NODE_FILE = 0x3377  # EGL_DRM_RENDER_NODE_FILE_EXT


def choose_card() -> None:
    """Tell MuJoCo the device behind EMBODIED_RENDER_FILE. One that names no file is taken by its place: NVIDIA's come
    first, by PCI address. Where there are fewer devices, as in containers without the driver's graphics part, the
    pictures come from what there is."""
    if (place := os.environ.get(CHOICE)) is None:
        return
    files, wanted = render_files(), os.environ.get("EMBODIED_RENDER_FILE", "")
    if wanted and wanted in files:
        os.environ[CHOICE] = str(files.index(wanted))
    elif int(place) >= len(files):
        print(f"EGL has no device {place} ({wanted or 'no file known'}): drawn on what it has", file=sys.stderr)
        del os.environ[CHOICE]


def render_files() -> list[str]:
    """Of EGL's devices in their order; "" of one that names none."""
    egl = ctypes.CDLL("libEGL.so.1")
    egl.eglGetProcAddress.restype, egl.eglGetProcAddress.argtypes = ctypes.c_void_p, [ctypes.c_char_p]

    def function(name: bytes, result: type, *arguments: type):
        address = egl.eglGetProcAddress(name)
        return ctypes.CFUNCTYPE(result, *arguments)(address) if address else None

    pointers, number = ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_int)
    query = function(b"eglQueryDevicesEXT", ctypes.c_uint, ctypes.c_int, pointers, number)
    text = function(b"eglQueryDeviceStringEXT", ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int)
    devices, found = (ctypes.c_void_p * MOST)(), ctypes.c_int()
    if query is None or text is None or not query(MOST, devices, ctypes.byref(found)):
        return []
    files = [text(device, RENDER_NODE_FILE) or b"" for device in devices[: found.value]]
    return [file.decode().rpartition("/")[2] for file in files]
