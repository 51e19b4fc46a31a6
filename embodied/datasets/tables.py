"""Parquet files: the frames, an entry per episode, the tasks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from embodied.datasets.feature_stats import QUANTILES
from embodied.datasets.lerobot_layout import Features, cameras

GROUP = 2000  # rows that are written at once: each group's description stays in memory until the file is complete


class TableFiles:
    """Rows into one parquet file after the other; what is added at once stays in one file."""

    def __init__(self, path: Callable[[int], Path], schema, file_bytes: int) -> None:
        """`path(n)` is the n-th file; the next one begins after so many bytes."""
        self.path, self.schema, self.file_bytes = path, schema, file_bytes
        self.file = 0  # into which the next rows go
        self._writer = None
        self._bytes = 0  # of this file so far
        self._waiting: list[Any] = []  # tables that are not written yet

    def add(self, columns: dict[str, Any]) -> int:
        """Write these rows; returns the number of their file."""
        import pyarrow as pa

        file, arrays = self.file, [as_column(columns[field.name], field.type) for field in self.schema]
        table = pa.Table.from_arrays(arrays, schema=self.schema)
        self._waiting.append(table)
        self._bytes += table.nbytes
        if self._bytes >= self.file_bytes:
            self.close()
            self.file += 1
        elif sum(map(len, self._waiting)) >= GROUP:
            self._write()
        return file

    def close(self) -> None:
        """Complete the file that is open."""
        self._write()
        if self._writer is not None:
            self._writer.close()
            self._writer, self._bytes = None, 0

    def discard(self) -> None:
        """Write no more."""
        self._waiting.clear()
        self.close()

    def _write(self) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        if not self._waiting:
            return
        if self._writer is None:
            self.path(self.file).parent.mkdir(parents=True, exist_ok=True)
            self._writer = pq.ParquetWriter(self.path(self.file), self.schema)
        self._writer.write_table(pa.concat_tables(self._waiting), row_group_size=GROUP)
        self._waiting.clear()


def as_column(values: Any, kind) -> Any:
    """Values of all rows as a column of this type; numbers in arrays are not looked at one by one."""
    import pyarrow as pa

    if isinstance(values, np.ndarray):
        flat = pa.array(np.ascontiguousarray(values).ravel())
        if pa.types.is_fixed_size_list(kind):
            return pa.FixedSizeListArray.from_arrays(flat.cast(kind.value_type), kind.list_size)
        return flat.cast(kind)
    return pa.array([value.tolist() if isinstance(value, np.ndarray) else value for value in values], kind)


def column_type(feature: dict[str, Any]):
    import pyarrow as pa

    number = pa.from_numpy_dtype(np.dtype(feature["dtype"]))
    (size,) = feature["shape"]
    return number if size == 1 else pa.list_(number, size)


def data_schema(features: Features):
    """A row is a frame; videos are kept apart."""
    import pyarrow as pa

    films = cameras(features)
    return pa.schema([(name, column_type(feature)) for name, feature in features.items() if name not in films])


def episodes_schema(features: Features):
    """A row is an episode: where its frames are, and their statistics."""
    import pyarrow as pa

    whole, time, number = pa.int64(), pa.float64(), pa.float64()
    fields = {"episode_index": whole, "tasks": pa.list_(pa.string()), "length": whole}
    fields |= {"dataset_from_index": whole, "dataset_to_index": whole}
    films = cameras(features)
    for part in ("data", "meta/episodes", *(f"videos/{name}" for name in films)):
        fields |= {f"{part}/chunk_index": whole, f"{part}/file_index": whole}
    for name in films:
        fields |= {f"videos/{name}/from_timestamp": time, f"videos/{name}/to_timestamp": time}
    for name in features:
        figures = pa.list_(pa.list_(pa.list_(number))) if name in films else pa.list_(number)
        fields |= {f"stats/{name}/{figure}": figures for figure in ("min", "max", "mean", "std", *QUANTILES)}
        fields[f"stats/{name}/count"] = pa.list_(whole)
    return pa.schema(fields | {"success": pa.bool_()})


def write_tasks(path: Path, tasks: list[str]) -> None:
    """What the robot was told, by number; pandas reads the texts as the index."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    index = "__index_level_0__"
    kinds = {"task_index": ("int64", "int64", "task_index"), index: ("unicode", "object", None)}
    columns = [
        {"name": name, "field_name": field, "pandas_type": kind, "numpy_type": numpy_type, "metadata": None}
        for field, (kind, numpy_type, name) in kinds.items()
    ]
    note = {"index_columns": [index], "column_indexes": [], "columns": columns}
    table = pa.table({"task_index": pa.array(range(len(tasks)), pa.int64()), index: pa.array(tasks, pa.string())})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table.replace_schema_metadata({"pandas": json.dumps(note)}), path)
