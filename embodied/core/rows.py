"""Rows of a data set on disk: JSONL, parquet, or a folder with such files or written by the package `datasets`.

Parquet and the arrow files of such a folder are read by pyarrow, if it is installed; `datasets` itself is not needed.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from embodied.core.errors import ConfigError

KINDS = ("*.parquet", "*.arrow", "*.jsonl")  # kinds of files in a folder; the first kind found is read
Row = tuple[str, dict[str, Any]]  # place for messages, content


def read_rows(path: Path) -> Generator[Row]:
    """The rows of a file, or of all files of a folder in the order of their names."""
    try:
        if path.is_dir():
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
        raise ConfigError(f"{path}: {err.strerror or err}") from None


def files_of(folder: Path) -> list[Path]:
    for kind in KINDS:
        if files := sorted(folder.rglob(kind)):
            return files
    raise ConfigError(f"{folder} holds no {', no '.join(kind[1:] for kind in KINDS)} files")


def row_of(line: bytes, where: str) -> Row:
    try:
        row = json.loads(line)
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
