"""Files on the Hugging Face hub, downloaded once and then read from its cache. Data sets are named

    hf:openai/gsm8k:main:train          hf:ORG/NAME[:CONFIG][:SPLIT][@REVISION]

A run pins the revision before it starts (`options.pinned`), so its config.yaml names the commit that all its workers
read. The files of a split are those that the data set's own README names, or those whose names contain it.
"""

from __future__ import annotations

import os
import re
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

from embodied.core.errors import ConfigError

NAME = re.compile(r"hf:(?P<repo>[\w.-]+/[\w.-]+)(?P<parts>(:[\w.-]+){0,2})(@(?P<revision>[\w./-]+))?")
SHARD = re.compile(r"-(\d+)-of-(\d+)\.\w+$")
KINDS = ("*.parquet", "*.jsonl")  # the first kind found is read
SPLITS = ("train", "validation", "test")


@lru_cache(64)
def data_files(name: str) -> tuple[str, tuple[Path, ...]]:
    """The commit of a data set `hf:...`, and its downloaded files in order."""
    if not (match := NAME.fullmatch(name)):
        raise ConfigError(f"{name}: a data set of the hub is named hf:ORG/NAME:CONFIG:SPLIT, such as {EXAMPLE}")
    repository, parts = match["repo"], [*filter(None, match["parts"].split(":"))]
    commit, there = listing(name, repository, match["revision"])
    stated: Any = []
    if "README.md" in there:
        stated = stated_splits(download(name, repository, commit, ["README.md"]) / "README.md")
    wanted = files_of_split(name, parts, stated, there)
    folder = download(name, repository, commit, wanted)
    files = tuple(folder / file for file in wanted)
    shards = max((int(shard[2]) for file in files if (shard := SHARD.search(file.name))), default=0)
    if len(files) < shards or not all(file.is_file() for file in files):
        raise ConfigError(
            f"{name} is in the cache in part, {folder}; download it whole: hf download --repo-type dataset {repository}"
        )
    return commit, files


EXAMPLE = "hf:openai/gsm8k:main:train"


def listing(name: str, repository: str, revision: str | None) -> tuple[str, tuple[str, ...]]:
    """The commit and the file names of a data set: the hub's, or without a connection those in the cache."""
    hub = of_hub(name)
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        info = hub.HfApi().dataset_info(repository, revision=revision)
        return str(info.sha), tuple(sorted(file.rfilename for file in info.siblings or ()))
    except (HFValidationError, RepositoryNotFoundError, RevisionNotFoundError) as err:
        raise ConfigError(f"{name}: the hub does not give it: {first_line(err)}") from None
    except Exception as err:  # the hub is down, or there is no connection
        try:
            options = {"revision": revision, "local_files_only": True, "allow_patterns": ["(none)"]}  # its place alone
            folder = Path(hub.snapshot_download(repository, repo_type="dataset", **options))
        except (OSError, ValueError):
            raise ConfigError(
                f"{name} is not in the cache, and the hub cannot be reached ({first_line(err)}); download it where it "
                f"can: hf download --repo-type dataset {repository}"
            ) from None
        files = (Path(above, file).relative_to(folder) for above, _, files in os.walk(folder) for file in files)
        return folder.name, tuple(sorted(map(str, files)))


def download(name: str, repository: str, commit: str, files: list[str]) -> Path:
    """The folder of these files in the hub's cache."""
    try:
        return Path(
            of_hub(name).snapshot_download(repository, repo_type="dataset", revision=commit, allow_patterns=files)
        )
    except Exception as err:
        raise ConfigError(f"{name}: the hub did not give {files[0]}: {first_line(err)}") from None


def of_hub(name: str) -> Any:
    try:
        import huggingface_hub
    except ModuleNotFoundError:
        raise ConfigError(f"{name} is on the Hugging Face hub: pip install huggingface_hub, or name a file") from None
    return huggingface_hub


def first_line(err: Exception) -> str:
    return (str(err).strip().splitlines() or [type(err).__name__])[0]


def stated_splits(readme: Path) -> list[tuple[str, str, list[str]]]:
    """Config, split and patterns of its files, as the README of a data set states them."""
    import yaml

    text = readme.read_text(encoding="utf-8")
    head = text.split("---", 2)[1] if text.startswith("---") else ""
    try:
        configs = (yaml.safe_load(head) or {}).get("configs") or []
        found = []
        for config in configs:
            files = config.get("data_files") or []
            for each in files if isinstance(files, list) else [files]:
                split, paths = (each["split"], each["path"]) if isinstance(each, dict) else ("train", each)
                found.append((str(config["config_name"]), split, [paths] if isinstance(paths, str) else [*paths]))
        return found
    except (yaml.YAMLError, AttributeError, KeyError, TypeError):
        return []  # the names of the files decide


def files_of_split(
    name: str, parts: list[str], stated: list[tuple[str, str, list[str]]], there: tuple[str, ...]
) -> list[str]:
    """The files of the named config and split. Raises ConfigError with the names to choose from."""
    kind = next((kind for kind in KINDS if any(fnmatch(file, kind) for file in there)), None)
    if kind is None:
        raise ConfigError(f"{name} has no files {' or '.join(KINDS)}; convert it, and name the file here")
    readable = [file for file in there if fnmatch(file, kind)]
    stated = [each for each in stated if any(fnmatch(file, path) for file in readable for path in each[2])]
    if not stated:
        stated = [("default", split, [f"*{split}*"]) for split in SPLITS if any(split in file for file in readable)]
        folders = {PurePosixPath(file).parts[0] for file in readable if "/" in file} - {"data"}
        stated += [(folder, split, [f"{folder}/*{split}*"]) for folder in sorted(folders) for _, split, _ in stated]
        stated = [each for each in stated if any(fnmatch(file, each[2][0]) for file in readable)]
        stated = stated or [("default", "train", ["*"])]
    fitting = [each for each in stated if {*parts} <= {*each[:2]}]
    if len(fitting) > 1 and (usual := [each for each in fitting if each[0] == "default"]):
        fitting = usual
    if len(fitting) != 1:
        known = ", ".join(f"hf:{name[3:].split(':')[0].split('@')[0]}:{config}:{split}" for config, split, _ in stated)
        raise ConfigError(f"{name}: {'which of' if fitting else 'it is none of'} {known}")
    return [file for file in readable if any(fnmatch(file, path) for path in fitting[0][2])]
