"""Files are replaced whole, their rows have places, and data sets of the hub are read at a commit."""

import errno
import json
import os
from pathlib import Path

import pytest

from embodied.core import files
from embodied.core.errors import ConfigError
from embodied.core.files import data_files, files_of_split, read_rows, whole_folder
from embodied.core.options import pinned
from tests.support.loopback_hub import commit_of, serve


def test_a_reader_sees_the_old_text_or_the_new_and_a_failed_write_leaves_no_draft(tmp_path, monkeypatch):
    def no_space(path):
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "latest").write_text("v000001\n")
    monkeypatch.setattr(files, "flush", no_space)
    with pytest.raises(OSError, match="No space left"):
        files.replace_text(tmp_path / "latest", "v000002\n")
    assert [path.name for path in tmp_path.iterdir()] == ["latest"]
    assert (tmp_path / "latest").read_text() == "v000001\n"
    monkeypatch.undo()
    with (tmp_path / "latest").open() as begun:
        files.replace_text(tmp_path / "latest", "v000002\n")
        assert begun.read() == "v000001\n", "who has opened it reads the old text to its end"
    assert (tmp_path / "latest").read_text() == "v000002\n"


def test_a_folder_gets_its_name_when_it_is_whole(tmp_path):
    for content in ("old", "new"):
        with whole_folder(tmp_path / "model") as aside:
            (aside / content).touch()
    with pytest.raises(KeyboardInterrupt), whole_folder(tmp_path / "model") as aside:
        raise KeyboardInterrupt
    assert [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*"))] == ["model", "model/new"]


def test_rows_of_lines_of_parquet_and_of_a_folder_of_datasets_are_the_same(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import ipc, parquet

    rows = [{"prompt": f"{n}+1=", "rate": n / 10} for n in range(10)]
    table, saved = pyarrow.Table.from_pylist(rows), tmp_path / "saved"
    (tmp_path / "a.jsonl").write_text("\n\n".join(map(json.dumps, rows)))
    parquet.write_table(table, tmp_path / "a.parquet")
    saved.mkdir()
    for part in (0, 1):  # as `save_to_disk` of the package datasets leaves it
        with ipc.new_stream(str(saved / f"data-{part:05d}-of-00002.arrow"), table.schema) as file:
            file.write_table(table.slice(5 * part, 5))
    (saved / "state.json").write_text("{}")
    places = {
        "a.jsonl": "a.jsonl, line 19",
        "a.parquet": "a.parquet, row 10",
        "saved": "data-00001-of-00002.arrow, row 5",
    }
    for name, last in places.items():
        found = [*read_rows(tmp_path / name)]
        assert [row for _, row in found] == rows and found[-1][0].endswith(last)
    whole = (tmp_path / "a.parquet").read_bytes()
    for damaged in (b"PAR1 and more", whole[:4] + bytes([whole[4] ^ 255]) + whole[5:]):  # in the head of the first page
        (tmp_path / "bad.parquet").write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"bad\.parquet[^\n]+$") as caught:
            [*read_rows(tmp_path / "bad.parquet")]
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not JSON"),
        ("[1]", "list, it must be"),
        (r'{"a": "\ud800"}', "surrogates not allowed"),
        ("\udcff", "not JSON"),
    ],
)
def test_a_bad_line_is_refused_with_its_place(tmp_path, line, reason):
    (tmp_path / "bad.jsonl").write_bytes(os.fsencode(f'{{"a": 1}}\n{line}\n'))
    with pytest.raises(ConfigError, match=rf"bad\.jsonl, line 2: .*{reason}"):
        [*read_rows(tmp_path / "bad.jsonl")]


README = b"""---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
- config_name: socratic
  data_files:
  - split: train
    path: socratic/train-*
---
# Sums
"""


def lines(*numbers):
    return b"".join(json.dumps({"question": f"{n}?", "answer": f"#### {n}"}).encode() + b"\n" for n in numbers)


SUMS = {
    "README.md": README,
    "main/train-00000-of-00002.jsonl": lines(1, 2),
    "main/train-00001-of-00002.jsonl": lines(3),
    "main/test-00000-of-00001.jsonl": lines(4),
    "socratic/train-00000-of-00001.jsonl": lines(5),
}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    pytest.importorskip("huggingface_hub")
    data_files.cache_clear()
    with serve({"openai/sums": SUMS}, monkeypatch, tmp_path / "hub") as asked:
        yield asked
    data_files.cache_clear()


def test_a_split_is_downloaded_once_and_then_read_from_the_cache_at_its_commit(hub, monkeypatch, tmp_path):
    name = pinned(Path("hf:openai/sums:main:train"))
    assert name == Path(f"hf:openai/sums:main:train@{commit_of(SUMS)}") == pinned(name)
    assert [row["question"] for _, row in read_rows(name)] == ["1?", "2?", "3?"]
    assert pinned({"a": ["hf:openai/sums:test"], "b": 1}) == {"a": [f"hf:openai/sums:test@{commit_of(SUMS)}"], "b": 1}
    assert not any("socratic" in path for path in hub), "other configs are not downloaded"
    data_files.cache_clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert [row["question"] for _, row in read_rows(name)] == ["1?", "2?", "3?"]
    next(tmp_path.glob("hub/*/snapshots/*/main/train-00001*")).unlink()
    data_files.cache_clear()
    with pytest.raises(ConfigError, match="is in the cache in part"):
        [*read_rows(name)]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("hf:openai/sums:train", "which of hf:openai/sums:main:train, .*hf:openai/sums:socratic:train"),
        ("hf:openai/sums:main:dev", "it is none of hf:openai/sums:main:train"),
        ("hf:openai/none", "the hub does not give it"),
        ("hf:sums", "is named hf:ORG/NAME:CONFIG:SPLIT"),
    ],
)
def test_an_ambiguous_or_unknown_dataset_name_is_refused_with_what_exists(hub, name, words):
    with pytest.raises(ConfigError, match=words) as told:
        data_files(name)
    assert "\n" not in str(told.value)


def test_without_a_connection_or_a_cache_the_command_that_downloads_is_named(hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="hf download --repo-type dataset openai/sums"):
        data_files("hf:openai/sums:main:test")


@pytest.mark.parametrize(
    ("parts", "files", "chosen"),
    [
        ([], ["test.jsonl"], ["test.jsonl"]),
        (["test"], ["data/train-0.parquet", "data/test-0.parquet"], ["data/test-0.parquet"]),
        (["algebra", "test"], ["algebra/test-0.parquet", "counting/test-0.parquet"], ["algebra/test-0.parquet"]),
        ([], ["aime.parquet", "aime.jsonl"], ["aime.parquet"]),
    ],
)
def test_without_a_readme_the_names_of_the_files_decide(parts, files, chosen):
    assert files_of_split("hf:a/b", parts, [], tuple(files)) == chosen
