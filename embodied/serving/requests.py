"""What a client asks, as a policy's observation: openpi's names of things, ours, and plain errors for what is missing.

Images are looked for under `images/CAMERA`, `observation/CAMERA` and CAMERA; as in openpi's LIBERO example, the first
camera is `observation/image` as well and the second `observation/wrist_image`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from embodied.core.types import EnvSpec, Observation
from embodied.serving.codec import BadMessage

ALIASES = ("image", "wrist_image")
LONGEST = 2000  # letters of an instruction
LARGEST = 4096  # pixels along a side
NUMBER = 8  # bytes of a number at most
OTHERS = 1_000_000  # bytes of a message for what this policy does not look at


def largest_array(spec: EnvSpec) -> int:
    """Bytes of the largest array that this policy looks at, whatever the kind of its numbers."""
    return NUMBER * max([math.prod(size) for size in spec.images.values()] + [spec.state_dim or 0])


def longest_question(spec: EnvSpec) -> int:
    """Bytes of a whole question."""
    numbers = sum(math.prod(size) for size in spec.images.values()) + (spec.state_dim or 0)
    return NUMBER * numbers + OTHERS


def observation_of(question: dict, spec: EnvSpec, any_size: bool) -> Observation:
    """One row; `any_size`: the policy scales images itself."""
    flat = {key: value for key, value in question.items() if isinstance(key, str)}
    flat |= {f"images/{camera}": image for camera, image in dict_of(flat.get("images")).items()}
    obs: Observation = {}
    if spec.images:
        obs["images"] = {
            camera: image_of(found(flat, *names_of(camera, number)), size, any_size, camera)[None]
            for number, (camera, size) in enumerate(spec.images.items())
        }
    if spec.state_dim:
        obs["state"] = state_of(found(flat, "observation/state", "state"), spec.state_dim)[None]
    if spec.instruction:
        obs["instruction"] = [text_of(found(flat, "prompt", "instruction"))]
    return obs


def names_of(camera: str, number: int) -> list[str]:
    aliases = [f"observation/{ALIASES[number]}"] if number < len(ALIASES) else []
    return [f"images/{camera}", f"observation/{camera}", camera, *aliases]


def dict_of(value: Any) -> dict:
    return value if isinstance(value, dict) else {}


def found(flat: dict[str, Any], *names: str) -> Any:
    for name in names:
        if name in flat:
            return flat[name]
    raise BadMessage(f"the question lacks {' or '.join(repr(name) for name in names)}")


def image_of(image: Any, size: tuple[int, int, int], any_size: bool, camera: str) -> np.ndarray:
    """uint8 [H, W, 3]; colours first and floats from 0 to 1 are taken too, as openpi does."""
    if not isinstance(image, np.ndarray) or image.ndim != 3 or 3 not in (image.shape[0], image.shape[2]):
        raise BadMessage(f"the image of {camera!r} should be an array [height, width, 3]")
    if image.shape[2] != 3:
        image = np.moveaxis(image, 0, 2)
    if image.shape != tuple(size) and not any_size:
        raise BadMessage(f"the image of {camera!r} is {list(image.shape)}, this policy wants {list(size)}")
    if not 1 <= min(image.shape[:2]) <= max(image.shape[:2]) <= LARGEST:
        raise BadMessage(f"the image of {camera!r} is {list(image.shape)}; at most {LARGEST} pixels a side are taken")
    if image.dtype.kind == "f":
        image = (255 * np.clip(np.nan_to_num(image), 0, 1)).astype(np.uint8)
    if image.dtype != np.uint8:
        raise BadMessage(f"the image of {camera!r} should be of bytes, or of floats from 0 to 1")
    return np.ascontiguousarray(image)


def state_of(state: Any, width: int) -> np.ndarray:
    if not isinstance(state, np.ndarray) or state.shape != (width,):
        raise BadMessage(f"the state should be an array of {width} numbers")
    state = state.astype(np.float32)
    if not np.isfinite(state).all():
        raise BadMessage("the state holds NaN or infinity")
    return state


def text_of(text: Any) -> str:
    if not isinstance(text, str) or not text.strip() or len(text) > LONGEST:
        raise BadMessage(f"the instruction should be text of at most {LONGEST} letters")
    return text
