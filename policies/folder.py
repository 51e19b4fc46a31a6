"""A policy on disk: config.json (family, options, the env it is for) and model.safetensors; read without torch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from embodied.data import ActionSpec, EnvSpec
from embodied.errors import CheckpointError
from embodied.runtime.blobs import Blob, array_of, read_safetensors

WEIGHTS = "model.safetensors"
CONFIG = "config.json"


def read_description(folder: Path) -> tuple[dict, EnvSpec]:
    """The policy's config (a plain dict) and the env it is for, from a policy folder."""
    path = folder / CONFIG
    if not path.is_file():
        raise CheckpointError(f"{folder} is not a policy folder: {CONFIG} is missing")
    try:
        content = json.loads(path.read_text())
        if "model_type" in content and "policy" not in content:
            raise CheckpointError(
                f"{folder} is a published {content['model_type']} model, which does not say for which env; "
                f"train it with policy.name={content['model_type']} policy.pretrained={folder}"
            )
        spec = dict(content["env_spec"])
        spec["action"] = ActionSpec(**spec["action"])
        spec["images"] = {camera: tuple(size) for camera, size in spec["images"].items()}
        policy = dict(content["policy"])
        if policy.get("pretrained") == ".":  # the folder itself holds what the policy was built from
            policy["pretrained"] = str(folder)
        return policy, EnvSpec(**spec)
    except (KeyError, TypeError, ValueError) as err:
        raise CheckpointError(f"{path} cannot be read as a policy description: {err}") from None


def read_blobs(folder: Path) -> dict[str, Blob]:
    """The weights as bytes, which are read when they are used."""
    path = folder / WEIGHTS
    if not path.is_file():
        raise CheckpointError(f"{folder} has no {WEIGHTS}")
    return read_safetensors(path)


def read_weights(folder: Path) -> dict[str, np.ndarray]:
    """The weights as arrays; bfloat16 as the same numbers in float32."""
    return {name: array_of(blob) for name, blob in read_blobs(folder).items()}
