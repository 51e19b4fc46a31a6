"""Pictures that Warp draws of rows whoever simulates them, `env.renderer=warp`.

`warp_pictures.py` draws in this process if its interpreter has MuJoCo Warp, else in a process of the locked environment
`libero_warp`: on cores one for each sim worker, on a GPU one for all sim workers. It gets a model once and then where
things are. A drawing process that dies is replaced; if its successor dies over the same picture, the sim worker fails.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from embodied.envs.capabilities import EvaluationProtocol
from embodied.envs.interpreter import locked
from embodied.envs.mujoco.rendering import SHOWN

PICTURES = "embodied.envs.libero.warp_pictures:Pictures"
LOCK = "libero_warp"
CARD = ("EMBODIED_RENDER", "CUDA_VISIBLE_DEVICES")  # the GPU on which a sim worker draws
MODEL = (  # arrays of a model that are needed to draw it
    *("geom_type", "geom_dataid", "geom_matid", "geom_group", "geom_size", "geom_rgba", "site_type", "site_group"),
    *("site_size", "mesh_vertadr", "mesh_vertnum", "mesh_faceadr", "mesh_facenum", "mesh_normaladr", "mesh_vert"),
    *("mesh_texcoordadr", "mesh_face", "mesh_normal", "mesh_facenormal", "mesh_texcoord", "mesh_facetexcoord"),
    *("mat_texid", "mat_texrepeat", "mat_texuniform", "mat_rgba", "mat_specular", "mat_shininess", "mat_emission"),
    *("mat_reflectance", "tex_type", "cam_fovy", "light_active", "light_cutoff", "light_exponent"),
    *("light_attenuation", "light_ambient", "light_diffuse", "light_specular"),
)
MOST_TEXELS = 1024  # on a side; finer textures are never seen in pictures of a few hundred pixels


def is_here() -> bool:
    """True if this interpreter can draw with Warp."""
    return importlib.util.find_spec("mujoco_warp") is not None


def check() -> None:
    """Raise ConfigError if nothing here draws with Warp."""
    if not is_here():
        locked.python_of(LOCK)


def named(protocol: EvaluationProtocol, config: Any) -> EvaluationProtocol:
    """The protocol, with the renderer in its name if the policy sees pictures of Warp's."""
    if config.renderer != "warp" or not config.cameras:
        return protocol
    name, rules = f"{protocol.name}+warp-pictures", f"{protocol.rules}; Warp draws the pictures, not MuJoCo"
    return replace(protocol, name=name, rules=rules)


class Drawer:
    """Draws rows of any scene.

    frames = Drawer(config).draw(scene, [row.shown for row in rows], cameras=[2, 5], side=128)
    """

    def __init__(self, config: Any) -> None:
        self.config = config
        self._process: Any = None
        self._pictures: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # of each scene; its number in the process
        on_gpu = bool(os.environ.get("EMBODIED_RENDER")) or config.backend == "warp_cuda"
        self._device = "cuda" if on_gpu else "cpu"

    def draw(self, scene: Any, rows: Sequence[Mapping[str, Any]], cameras: Sequence[int], side: int) -> np.ndarray:
        """uint8 [rows, cameras, side, side, 3], upright."""
        shown = {name: np.stack([np.asarray(row[name], np.float32) for row in rows]) for name in SHOWN}
        if is_here():
            return self._here(scene).draw(shown, [*cameras], side)
        from embodied.envs.interpreter.env import ProcessDied

        try:
            return self._ask(scene, shown, [*cameras], side)
        except ProcessDied as err:
            print(f"env.renderer=warp: {err}; another one draws", file=sys.stderr)
            self._process = None
        return self._ask(scene, shown, [*cameras], side)

    def _here(self, scene: Any) -> Any:
        if scene not in self._pictures:
            from embodied.envs.libero.warp_pictures import Pictures

            self._pictures[scene] = Pictures(arrays_of(scene.model), self._device)
        return self._pictures[scene]

    def _ask(self, scene: Any, *picture: Any) -> np.ndarray:
        from embodied.envs.interpreter.env import Process, SharedProcess

        if self._process is None:
            options = self.config.model_copy(update={"python": "auto", "backend": "warp"})
            card = " ".join(os.environ.get(name, "") for name in CARD)
            self._process = SharedProcess(options, card) if self._device == "cuda" else Process(options)
            self._process.what = "env.renderer=warp"
            self._pictures.clear()
        if scene not in self._pictures:
            drawn = set(self._pictures.values())
            for gone in self._process.envs - drawn:
                self._process.call("close", gone)
            model = arrays_of(scene.model)
            key = digest(model)
            number = self._process.call("make", key, PICTURES)
            if number is None:
                number = self._process.call("make", key, PICTURES, model, self._device)
            self._pictures[scene] = number
            self._process.envs = {*drawn, number}
        return self._process.call("call", self._pictures[scene], "draw", picture)


def arrays_of(model: Any) -> dict[str, Any]:
    """What a picture needs to know of a model, of any version of MuJoCo, as arrays."""
    arrays = {name: np.array(getattr(model, name)) for name in MODEL}
    if hasattr(model, "light_directional"):
        arrays["light_directional"] = np.array(model.light_directional, int)
    else:
        arrays["light_directional"] = (np.array(model.light_type) == 1).astype(int)
    images = [small(image_of(model, texture)) for texture in range(model.ntex)]
    head = model.vis.headlight
    return arrays | {
        "near": float(model.vis.map.znear * model.stat.extent),
        "headlight": np.array([head.ambient, head.diffuse, head.specular]) * head.active,
        "images": images,
    }


def digest(model: Mapping[str, Any]) -> str:
    """The same for equal models."""
    parts = [array for value in model.values() for array in (value if isinstance(value, list) else [value])]
    return sha256(b"".join(np.ascontiguousarray(array).tobytes() for array in parts)).hexdigest()


def image_of(model: Any, texture: int) -> np.ndarray:
    height, width, depth = (int(getattr(model, f"tex_{of}")[texture]) for of in ("height", "width", "nchannel"))
    data = model.tex_data.reshape(-1)[model.tex_adr[texture] :][: height * width * depth]
    image = data.reshape(height, width, depth)
    return image[..., [0, 1, 2] if depth > 2 else [0, 0, 0]]


def small(image: np.ndarray) -> np.ndarray:
    """The image, halved until it has few texels."""
    while image.shape[1] > MOST_TEXELS:
        even = image[: len(image) // 2 * 2, : image.shape[1] // 2 * 2].astype(np.uint16)
        image = ((even[::2, ::2] + even[1::2, ::2] + even[::2, 1::2] + even[1::2, 1::2] + 2) // 4).astype(np.uint8)
    return image
