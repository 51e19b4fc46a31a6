"""Policies on the Hugging Face hub: fetched once, then read from its cache."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from embodied.core.errors import CheckpointError
from embodied.core.files import as_path

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# No code is fetched; *.pt files are read as tensors only.
FILES = ["*.json", "*.safetensors", "tokenizer.model", "merges.txt", "chat_template.jinja", "*--*_checkpoint.pt"]
SHAPE = ["config.json"]
ADAPTERS = ["adapter_config.json", "adapter_model.safetensors"]
MADE_HERE = {"models/SmolLM2-135M-Instruct": "python scripts/smollm2.py"}  # folder -> the command that makes it


def is_hub_id(checkpoint: str) -> bool:
    """True for ORG/NAME, unless its first part is a local folder."""
    return HUB_ID.fullmatch(checkpoint) is not None and not Path(checkpoint).parent.is_dir()


def folder_of(checkpoint: str) -> Path:
    """The policy's local folder; a model that only the hub has is downloaded."""
    return fetch(checkpoint) if is_hub_id(checkpoint) else as_path(checkpoint)


def fetch(repository: str, key: str = "checkpoint", files: Sequence[str] = FILES) -> Path:
    """Download these files of the model `ORG/NAME`; returns their folder."""
    by_hand = f"hf download {repository} --local-dir DIR, then {key}=DIR"
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ModuleNotFoundError:
        raise CheckpointError(
            f"{key}={repository}: there is no such folder, and fetching it as a Hugging Face hub id needs "
            "pip install huggingface_hub"
        ) from None
    try:
        return Path(snapshot_download(repository, allow_patterns=[*files]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as err:
        cause = str(err).strip().splitlines()[0]
        raise CheckpointError(
            f"{key}={repository}: there is no such folder, and the Hugging Face hub did not give it ({cause}). "
            f"If it can be reached: {by_hand}"
        ) from None


def how_to_get(name: str) -> str:
    """A phrase that says where to get a missing model."""
    if name in MADE_HERE:
        return MADE_HERE[name]
    return f"hf download {name}" if is_hub_id(name) else "there is no such folder"


def with_folder(policy: Any, dry: bool = False, elsewhere: bool = False) -> Any:
    """The policy's options with local folders in place of hub ids. Missing files are downloaded; for a dry run only the
    config files of a language model. Raises CheckpointError for a folder without such a model. A plan for machines
    `elsewhere` needs no files of robot policies, and no weights."""
    if not policy.published:
        return policy
    changes: dict[str, Any] = {}
    for key, files in (("pretrained", FILES), ("lora_path", ADAPTERS)):
        name = getattr(policy, key, None)
        if name is None:
            continue
        if (folder := as_path(name)).exists():
            if key == "pretrained":
                check_model(folder, policy, weights=dry and not elsewhere)  # otherwise the workers check it
                policy.check_sizes(folder)
        elif elsewhere and not policy.speaks:  # published models have full size
            changes |= {"preset": "full"} if key == "pretrained" else {key: None}
        else:
            changes[key] = str(folder_for(name, f"policy.{key}", SHAPE if dry and policy.speaks else files))
    return policy.model_copy(update=changes)


def missing_folders(policy: Any) -> list[str]:
    """Remarks on folders of the policy that this machine lacks, for a plan for other machines."""
    named = {key: getattr(policy, key, None) for key in ("pretrained", "lora_path")} if policy.published else {}
    return [
        f"policy.{key}={name} is not on this machine; planned for a model of full size, and nothing in it was checked"
        for key, name in named.items()
        if name and not as_path(name).exists()
    ]


def folder_for(name: str, key: str, files: Sequence[str]) -> Path:
    """The downloaded folder of a model on the hub."""
    if name in MADE_HERE:
        raise CheckpointError(f"{key}={name}: there is no such folder; make it: {MADE_HERE[name]}")
    if not is_hub_id(name):
        raise CheckpointError(f"{key}={name}: there is no such folder, and a hub id is ORG/NAME")
    return fetch(name, key, files)


def check_model(folder: Path, policy: Any, weights: bool = True, key: str = "policy.pretrained") -> None:
    """Refuse a folder that holds no model of the policy's family; without `weights` its shape is enough. Messages name
    the folder by `key`."""
    from embodied.policies.policy_folder import check_files, families_of

    given = f"{key}={folder}"
    if not (folder / SHAPE[0]).is_file():
        raise CheckpointError(f"{given}: {SHAPE[0]} is missing, so it is not a folder of a model")
    if not any(folder.glob("*.safetensors")):
        if weights:
            raise CheckpointError(f"{given}: the model has no weights there, no file *.safetensors")
        return
    check_files(folder)
    families = families_of(folder)
    if families and policy.name not in families:
        raise CheckpointError(
            f"{given}: the model there is {families[0]}, and policy.name={policy.name}; "
            f"set policy.name={families[0]}, or name a folder of {policy.name}"
        )
