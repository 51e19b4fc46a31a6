"""Data sets of the hub: which files are read, at which commit, and what is said when there is none."""

import json
from pathlib import Path

import pytest

pytest.importorskip("huggingface_hub")

from embodied.core.errors import ConfigError
from embodied.core.files import data_files, files_of_split, read_rows
from embodied.core.options import pinned
from tests.support.loopback_hub import commit_of, serve

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
