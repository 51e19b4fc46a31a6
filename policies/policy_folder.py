"""A policy on disk: config.json (family, options, the env it is for) and model.safetensors; read without torch.

If other programs load the folder as a model, weights that predict values are in its subfolder `values/`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from embodied.core.errors import CheckpointError
from embodied.core.files import as_path, digest, read_object, reading
from embodied.core.types import EnvSpec
from embodied.policies.config import POLICY_CONFIGS, PublishedFolder
from embodied.runtime.published_weights import Blob, array_of, blob_of, read_safetensors, spec_of, write_safetensors

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
VALUES = "values"
CHECKSUMS = "checksums.json"  # of the files of a policy folder
MANIFEST = "manifest.json"  # of a checkpoint, which holds policy folders:
POLICY, AVERAGE = "policy", "average"  # the weights that are trained, and with algo.average the mean of the last ones
LANGUAGE_FOLDERS = "embodied.policies.language.folder"  # imported when needed: it imports transformers
OURS = ("policy", "env_spec", "base", "base_names")  # our keys in config.json, beside the published keys
TOKENIZER = "tokenizer.json"
TOKENIZER_FILES = (
    TOKENIZER,
    f"tokenizer/{TOKENIZER}",  # lerobot's
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)


@contextmanager
def checksums(folder: Path) -> Iterator[None]:
    """Writes the checksums of all files that are written into a folder meanwhile."""
    path = folder / CHECKSUMS
    path.write_text("{}\n")

    def files() -> dict[Path, tuple[int, int, int]]:
        """Which files are here; no clock is asked, since it may be set meanwhile."""
        found = {file: file.stat() for file in sorted(folder.rglob("*")) if file.is_file() and file != path}
        return {file: (stat.st_ino, stat.st_mtime_ns, stat.st_size) for file, stat in found.items()}

    before = files()
    yield
    written = [file for file, what in files().items() if before.get(file) != what]
    sums = {str(file.relative_to(folder)): digest(file) for file in written}
    path.write_text(json.dumps({"files": sums}, indent=2) + "\n")


def check_files(folder: Path) -> None:
    """Compare a policy folder with its checksums, or with those of its checkpoint; other programs' folders have
    none."""
    checksums, above = folder / CHECKSUMS, folder.resolve().parent / MANIFEST
    path, within = (checksums, "") if checksums.is_file() else (above, f"{folder.resolve().name}/")
    if not path.is_file():
        return
    files = read_json(path).get("files")
    if not isinstance(files, dict):
        if path == above:  # another program's
            return
        raise CheckpointError(f"{folder} was not saved whole, or is damaged: {path} lists no files")
    expected = {name.removeprefix(within): value for name, value in files.items() if name.startswith(within)}
    for name, value in expected.items():
        file = folder / name
        with reading(file, CheckpointError):
            if file.is_file() and digest(file) == value:
                continue
        what = "does not match its checksum" if file.is_file() else "is missing"
        raise CheckpointError(
            f"{folder} is damaged: {name} {what} ({path}); if you have changed it, "
            f"take a copy of the folder without {CHECKSUMS}"
        )


def read_description(folder: Path) -> tuple[Any, EnvSpec]:
    """The policy's config and the env it is for, from a policy folder."""
    path = folder / CONFIG
    if not path.is_file():
        raise CheckpointError(f"{folder} is not a policy folder: {CONFIG} is missing")
    content = read_json(path)
    with reading(path, CheckpointError):
        if "policy" not in content and (family := published_family(folder)):
            raise CheckpointError(
                f"{folder} is a published {family} model, which does not say for which env; "
                f"train it with policy.name={family} policy.pretrained={folder}"
            )
        if "policy" not in content and (kind := content.get("model_type")):
            raise CheckpointError(
                f"{folder} holds a {kind}, and models of this kind are not supported: language models are those whose "
                "config.json names a ...ForCausalLM, or with images Qwen2.5-VL, Idefics3 and SmolVLM, and robot "
                "policies OpenVLA, OpenVLA-OFT, Pi0, Pi0.5 and SmolVLA"
            )
        if missing := [name for name in ("policy", "env_spec") if name not in content]:
            raise CheckpointError(f"{path} is not a policy of ours: it has no {' and no '.join(missing)}")
        spec = dict(content["env_spec"])
        if unknown := spec.keys() - {field.name for field in fields(EnvSpec)}:
            raise ValueError(f"env_spec has {', '.join(sorted(unknown))}, which are unknown")
        policy = dict(content["policy"])
        if policy.get("pretrained") == ".":  # the policy was built from this folder
            policy["pretrained"] = str(folder)
        name = policy.get("name", "mlp")
        options = POLICY_CONFIGS.get("external" if ":" in str(name) else str(name))
        if not isinstance(name, str) or options is None:
            raise ValueError(f"policy.name={name!r:.60} is unknown; families: {', '.join(POLICY_CONFIGS.names)}")
        config = validated(options, policy, f"the options of policy.name={name}: policy.")
        return config, validated(EnvSpec, spec, "env_spec.")


def validated(kind: type, values: dict[str, Any], section: str) -> Any:
    """An object of this class; ValueError names the first wrong value, in the words of recipes."""
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(kind).validate_python(values)
    except ValidationError as err:
        wrong = err.errors()[0]
    place = section + ".".join(map(str, wrong["loc"]))
    if wrong["type"] in ("extra_forbidden", "missing"):
        raise ValueError(f"{place} is {'missing' if wrong['type'] == 'missing' else 'unknown'}")
    raise ValueError(
        f"{place}={wrong['input']!r:.60}: {wrong['msg'].removeprefix('Input ').removeprefix('Value error, ')}"
    )


def published_family(folder: Path) -> str | None:
    """policy.name of a published model; None for our policies and other folders."""
    content = read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    if not content or "policy" in content:
        return None
    files = PublishedFolder(content, frozenset(path.name for path in folder.iterdir()), partial(read_blobs, folder))
    kinds = dict.fromkeys(POLICY_CONFIGS.values())
    return next((name for options in kinds if (name := options.recognise(files))), None)


def families_of(folder: Path) -> tuple[str, ...]:
    """The values of policy.name that fit the model in a folder, likeliest first; () if its config.json is not
    recognised."""
    if family := published_family(folder):
        return (family, *(POLICY_CONFIGS[family].alike if family in POLICY_CONFIGS else ()))
    ours = read_json(folder / CONFIG).get("policy")
    name = ours.get("name") if isinstance(ours, dict) else None
    return (str(name),) if name else ()


def copy_files(source: Path, folder: Path, patterns: Iterable[str]) -> None:
    """Copy the files that stay unchanged beside the weights."""
    if source.resolve() == folder.resolve():
        return
    for file in (file for pattern in patterns for file in source.glob(pattern)):
        target = folder / file.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)


def read_blobs(folder: Path) -> dict[str, Blob]:
    """The weights, whole or in shards, as bytes that are read on access. Includes the base model's weights if the
    folder has only adapters, and weights that predict values from `values/`."""
    blobs = _read_shards(folder) if (folder / INDEX).is_file() else _read_one_file(folder)
    if (folder / VALUES).is_dir():
        blobs = blobs | _read_one_file(folder / VALUES)
    blobs = {own_layer(name): blob for name, blob in blobs.items()}
    config = read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    if (base := config.get("base")) is None:
        return blobs
    if not Path(base).is_dir():
        raise CheckpointError(f"{folder} holds adapters for the model in {base}, which is not there any more")
    below, names = read_blobs(Path(base)), config.get("base_names", {})
    names = {own_layer(name): own_layer(stored) for name, stored in names.items()}
    if set(names.values()) - below.keys() and published_family(Path(base)) == "language":
        below |= import_module(LANGUAGE_FOLDERS).read_modules(Path(base))
    if lost := sorted(set(names.values()) - below.keys()):
        raise CheckpointError(f"{folder} holds adapters for another model than that in {base}: {lost[0]} is not there")
    return {our_name: below[stored] for our_name, stored in names.items()} | blobs


def own_layer(name: str) -> str:
    """The name of a weight without adapters; peft renames adapted layers."""
    return name.replace(".base_layer.", ".")


def _read_one_file(folder: Path) -> dict[str, Blob]:
    if not (folder / WEIGHTS).is_file():
        raise CheckpointError(f"{folder} has no weights: neither {WEIGHTS} nor {INDEX}")
    return read_safetensors(folder / WEIGHTS)


def _read_shards(folder: Path) -> dict[str, Blob]:
    where = read_json(folder / INDEX).get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(name, str) for name in where.values()):
        raise CheckpointError(f"{folder / INDEX} is damaged: it has no weight_map of tensors and their files")
    files = sorted(set(where.values()))
    if odd := [name for name in files if Path(name).name != name or not (folder / name).is_file()]:
        raise CheckpointError(f"{folder} is incomplete: {', '.join(odd[:4])} of {INDEX} missing")
    blobs: dict[str, Blob] = {}
    for name in files:
        blobs |= read_safetensors(folder / name)
    if lost := sorted(where.keys() - blobs.keys()):
        raise CheckpointError(f"{folder}: no shard holds {', '.join(lost[:4])}")
    return blobs


def read_json(path: Path) -> dict[str, Any]:
    return read_object(path, CheckpointError)


def no_policy_in(text: str) -> str:
    """The error for a path without a policy (no run, checkpoint or policy folder); else empty."""
    if any((as_path(text) / file).is_file() for file in ("run.json", MANIFEST, CONFIG)):
        return ""
    return f"{text}: no policy in it; name a run folder, a checkpoint (v000123) or a policy folder"


def read_weights(folder: Path) -> dict[str, np.ndarray]:
    """The weights as arrays; bfloat16 is converted to float32."""
    return {name: array_of(blob) for name, blob in read_blobs(folder).items()}


def write_values(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write weights that predict values into `values/` of a folder."""
    (folder / VALUES).mkdir(exist_ok=True)
    write_tensors(folder / VALUES / WEIGHTS, tensors)


def write_shards(path: Path, weights: dict[str, Tensor], shard_bytes: int) -> None:
    """Write weights in shards of at most `shard_bytes` (a larger tensor gets its own shard), or in one file if one
    shard suffices."""
    shards = list(_split_by_size(weights, shard_bytes))
    if len(shards) == 1:
        write_tensors(path / WEIGHTS, shards[0])
        return
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_tensors(path / name, shard)
        index |= dict.fromkeys(shard, name)
    total = sum(spec_of(tensor).size_bytes for tensor in weights.values())
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))}
    (path / INDEX).write_text(json.dumps(content, indent=2) + "\n")


def _split_by_size(weights: dict[str, Tensor], limit: int) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in weights.items():
        more = spec_of(tensor).size_bytes
        if shard and size + more > limit:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += more
    yield shard


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    specs = {name: spec_of(tensor) for name, tensor in tensors.items()}
    write_safetensors(path, specs, ((name, blob_of(tensor)) for name, tensor in tensors.items()))
