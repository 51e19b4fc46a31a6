"""Policies on the Hugging Face hub: fetched once, then read from its cache."""

from __future__ import annotations

from pathlib import Path

from embodied.errors import CheckpointError

FILES = [
    "*.json",
    "*.safetensors",
    "tokenizer.model",
    "*--*_checkpoint.pt",
]  # no code; the last is read as tensors only


def fetch(repository: str) -> Path:
    """The folder of the policy `ORG/NAME`."""
    by_hand = f"hf download {repository} --local-dir DIR, then checkpoint=DIR"
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ModuleNotFoundError:
        raise CheckpointError(
            f"checkpoint={repository}: there is no such folder, and to fetch it as a Hugging Face hub id takes "
            "pip install huggingface_hub"
        ) from None
    try:
        return Path(snapshot_download(repository, allow_patterns=FILES))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as err:
        cause = str(err).strip().splitlines()[0]
        raise CheckpointError(
            f"checkpoint={repository}: there is no such folder, and the Hugging Face hub did not give it ({cause}). "
            f"Where it can be reached: {by_hand}"
        ) from None
