"""Reads files of other programs, and writes small files atomically. A damaged file becomes an error that names it.

The rows of a data set are JSONL, parquet, a folder with such files or written by the package `datasets`, or a data set
of the Hugging Face hub, which is downloaded once and then read from its cache. Parquet and the arrow files of such a
folder are read by pyarrow, if it is installed; `datasets` itself is not needed. Data sets of the hub are named

    hf:openai/gsm8k:main:train          hf:ORG/NAME[:CONFIG][:SPLIT][@REVISION]

A run pins the revision before it starts (`options.pinned`), so its config.yaml names the commit that all its workers
read. The files of a split are those that the data set's own README names, or those whose names contain it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TextIO

from embodied.core.errors import ConfigError, EmbodiedError, printable_error

if TYPE_CHECKING:
    import numpy as np

CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")  # ends a line, or cannot be written as UTF-8
LONGEST_PART = 255  # bytes of a name, in file systems
ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")  # s3://bucket; pathlib merges the slashes
DAMAGE = (
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


class BadPath(ConfigError, ValueError):
    """A text that cannot be a path."""


def check_place(key: str, path: Path, new: bool = False) -> Path:
    """The path of a file or folder, `new` if it may not exist. Raises ConfigError if its place cannot hold it."""
    if new and path.exists():
        raise ConfigError(f"{key}={path} exists already; name another folder")
    there = next((above for above in [path, *path.parents] if above.exists()), path)
    if not (there.is_dir() and os.access(there, os.W_OK)):
        what = "cannot be written" if there.is_dir() else "is not a folder"
        raise ConfigError(f"{key}={path}: {there} {what}; name another place")
    return path


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill; without an error it gets this name, in place of an older folder."""
    aside = folder.with_name(f".{folder.name}-{os.getpid()}")
    aside.mkdir(parents=True)
    try:
        yield aside
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def cache_folder() -> Path:
    """Our folder in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "embodied-loop"


def as_path(text: str | Path) -> Path:
    """The path that a user wrote, `~` resolved."""
    path = Path(text)
    if odd := CONTROL.search(str(path)):
        raise BadPath(f"{str(path)!r} cannot be a path: it holds the character {odd[0]!r}; leave it out")
    if long := next((part for part in path.parts if len(os.fsencode(part)) > LONGEST_PART), None):
        raise BadPath(f"{long[:20]}... has {len(os.fsencode(long))} bytes; a file's name has at most {LONGEST_PART}")
    if ADDRESS.match(str(path)):
        raise BadPath(f"{path} is an address, which cannot be a path; name a folder or file of this machine")
    try:
        return path.expanduser()
    except RuntimeError:
        raise BadPath(f"{path}: there is no user {path.parts[0][1:]}; write the path without ~") from None


@contextmanager
def reading(path: Path, kind: type[EmbodiedError] = EmbodiedError, advice: str = "") -> Iterator[None]:
    """Turns every error while this file is read and parsed into an error of this kind, with this advice."""
    try:
        yield
    except DAMAGE as err:
        raise kind(f"{path} cannot be read: {in_words(err)}{advice and f'; {advice}'}") from err


def in_words(err: Exception) -> str:
    """An exception in one line."""
    if isinstance(err, OSError) and err.strerror:
        return err.strerror
    text = printable_error(" ".join(str(err).split()))[:300]
    return f"it has no {text}" if isinstance(err, KeyError) else text or type(err).__name__


def read_object(path: Path, kind: type[EmbodiedError] = EmbodiedError, advice: str = "") -> dict[str, Any]:
    """The mapping in a JSON file."""
    with reading(path, kind, advice):
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it holds no mapping")
        return content


def read_arrays(path: Path, kind: type[EmbodiedError] = EmbodiedError) -> dict[str, np.ndarray]:
    """The arrays of an npz file."""
    from zipfile import BadZipFile
    from zlib import error as BadBytes

    import numpy as np

    with reading(path, kind):
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as content:
                return {name: content[name] for name in content.files}
        except (BadZipFile, BadBytes, NotImplementedError) as err:
            raise ValueError(f"it is not an archive of arrays ({err})") from err


def replace_text(path: Path, text: str) -> None:
    """Replace a small file in one step, so that a reader sees the old or the new text."""
    draft = path.with_name(f".{path.name}.writing")
    try:
        draft.write_bytes(encode(text))
        flush(draft)
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def encode(text: str) -> bytes:
    """UTF-8 with escapes for half surrogate pairs, which stand for other bytes; the result is valid in JSON."""
    return text.encode("utf-8", "backslashreplace")


def show(text: str, stream: TextIO | None) -> None:
    """Write to a stream at once, with escapes for characters that its encoding lacks. If the terminal or pipe is
    closed, nothing is shown from now on."""
    try:
        print(text, end="", file=stream, flush=True)
    except UnicodeEncodeError:
        show(text.encode("ascii", "backslashreplace").decode(), stream)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), (stream or sys.stdout).fileno())


def aligned(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table on the console."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in (head, *rows)]


def digest(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def flush(path: Path) -> None:
    """Write a file's or folder's content to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def locked_folder(parent: Path, name: str, mode: int = 0o777) -> tuple[Path, int]:
    """Create a folder `name`-... with a lock that ends with this process; returns its path and the lock, an open file.
    Such folders of ended processes are removed."""
    for left in parent.glob(f"{name}-*"):
        with suppress(OSError):  # another process removes or uses it
            lock = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left)
            finally:
                os.close(lock)
    token = secrets.token_hex(8)
    (aside := parent / f"new-{name}-{token}").mkdir(mode)  # locked before others see its name
    lock = os.open(aside, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return aside.rename(parent / f"{name}-{token}"), lock


KINDS = ("*.parquet", "*.arrow", "*.jsonl")  # kinds of files in a folder; the first kind found is read
Row = tuple[str, dict[str, Any]]  # place for messages, content


def is_data_set(path: Any) -> bool:
    """True for the name of a data set on the Hugging Face hub."""
    return str(path).startswith("hf:")


def read_rows(path: Path) -> Generator[Row]:
    """The rows of a file, or of all files of a folder or a data set of the hub in the order of their names."""
    try:
        if is_data_set(path) or path.is_dir():
            for file in files_of(path):
                yield from read_rows(file)
        elif path.suffix in (".parquet", ".arrow"):
            yield from table_rows(path)
        else:
            with path.open("rb") as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        yield row_of(line, f"{path}, line {number}")
    except OSError as err:
        raise ConfigError(f"{path}: {in_words(err)}") from None


def files_of(folder: Path) -> list[Path]:
    """The files of a data set, in order."""
    if is_data_set(folder):
        from embodied.core.files import data_files

        return [*data_files(str(folder))[1]]
    for kind in KINDS:
        if files := sorted(folder.rglob(kind)):
            return files
    raise ConfigError(f"{folder} holds no {', no '.join(kind[1:] for kind in KINDS)} files")


def row_of(line: bytes, where: str) -> Row:
    try:
        row = json.loads(line)
        if b"\\u" in line:
            json.dumps(row, ensure_ascii=False).encode()  # refuses half surrogate pairs, which tokenizers do not take
    except ValueError as err:
        raise ConfigError(f"{where}: not JSON: {err}") from None
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: {type(row).__name__}, it must be an object")
    return where, row


def table_rows(path: Path) -> Iterator[Row]:
    if find_spec("pyarrow") is None:
        raise ConfigError(f"{path} is read by pyarrow: pip install 'embodied-loop[datasets]'; JSONL needs nothing")
    import pyarrow
    from pyarrow import ipc, parquet

    number = 0
    try:
        if path.suffix == ".parquet":
            batches: Any = parquet.ParquetFile(path).iter_batches()
        else:
            file = pyarrow.memory_map(str(path))
            batches = ipc.open_stream(file)
        for batch in batches:
            for row in batch.to_pylist():
                number += 1
                yield f"{path}, row {number}", row
    except pyarrow.ArrowException as err:
        raise ConfigError(f"{path} is damaged, or of another kind: {str(err).splitlines()[0]}") from None


NAME = re.compile(r"hf:(?P<repo>[\w.-]+/[\w.-]+)(?P<parts>(:[\w.-]+){0,2})(@(?P<revision>[\w./-]+))?")
SHARD = re.compile(r"-(\d+)-of-(\d+)\.\w+$")
HUB_KINDS = ("*.parquet", "*.jsonl")  # the first kind found is read
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
            for file in files if isinstance(files, list) else [files]:
                split, paths = (file["split"], file["path"]) if isinstance(file, dict) else ("train", file)
                found.append((str(config["config_name"]), split, [paths] if isinstance(paths, str) else [*paths]))
        return found
    except (yaml.YAMLError, AttributeError, KeyError, TypeError):
        return []  # the names of the files decide


def files_of_split(
    name: str, parts: list[str], stated: list[tuple[str, str, list[str]]], there: tuple[str, ...]
) -> list[str]:
    """The files of the named config and split. Raises ConfigError with the names to choose from."""
    kind = next((kind for kind in HUB_KINDS if any(fnmatch(file, kind) for file in there)), None)
    if kind is None:
        raise ConfigError(f"{name} has no files {' or '.join(HUB_KINDS)}; convert it, and name the file here")
    readable = [file for file in there if fnmatch(file, kind)]
    stated = [entry for entry in stated if any(fnmatch(file, path) for file in readable for path in entry[2])]
    if not stated:
        stated = [("default", split, [f"*{split}*"]) for split in SPLITS if any(split in file for file in readable)]
        folders = {PurePosixPath(file).parts[0] for file in readable if "/" in file} - {"data"}
        stated += [(folder, split, [f"{folder}/*{split}*"]) for folder in sorted(folders) for _, split, _ in stated]
        stated = [entry for entry in stated if any(fnmatch(file, entry[2][0]) for file in readable)]
        stated = stated or [("default", "train", ["*"])]
    fitting = [entry for entry in stated if {*parts} <= {*entry[:2]}]
    if len(fitting) > 1 and (usual := [entry for entry in fitting if entry[0] == "default"]):
        fitting = usual
    if len(fitting) != 1:
        addresses = ", ".join(
            f"hf:{name[3:].split(':')[0].split('@')[0]}:{config}:{split}" for config, split, _ in stated
        )
        raise ConfigError(f"{name}: {'which of' if fitting else 'it is none of'} {addresses}")
    return [file for file in readable if any(fnmatch(file, path) for path in fitting[0][2])]
