"""What can be wrong with a dataset's files, as functions that make it so, and what a refusal must be."""

import json

import pyarrow as pa
import pyarrow.parquet as pq

# One learner, because of two that fail either may be the first to say so.
ONE_LEARNER = 'placement={"sim,policy": "cpu:0", learner: "cpu:0"}'
LEARN = [
    "recipe=pointmass_ppo",
    "cluster.backend=inline",
    ONE_LEARNER,
    "env.num_envs=2",
    "policy.hidden=[4]",
    "sft.epochs=1",
]
INFO = "meta/info.json"


def info(**changes):
    """info.json with these keys."""

    def damage(path):
        content = json.loads((path / INFO).read_text()) | changes
        (path / INFO).write_text(json.dumps({key: value for key, value in content.items() if value != "gone"}))

    return damage


def text(file, content):
    return lambda path: (path / file).write_text(content)


def cut(file, share=0.5):
    def damage(path):
        content = (path / file).read_bytes()
        (path / file).write_bytes(content[: int(share * len(content))])

    return damage


def gone(file):
    return lambda path: (path / file).unlink()


def rows(file, change):
    """A parquet file with other columns."""

    def damage(path):
        table = pq.read_table(path / file).to_pydict()
        pq.write_table(pa.table(change(table)), path / file)

    return damage


def cell(name, value, row=0):
    """A column with another value in one row."""

    def change(table):
        return table | {name: [value if number == row else old for number, old in enumerate(table[name])]}

    return change


def without(name):
    return lambda table: {key: column for key, column in table.items() if key != name}


def every(name, value):
    return lambda table: table | {name: [value] * len(table[name])}


def first_rows(count):
    return lambda table: {key: column[:count] for key, column in table.items()}


def refused(said, reason, path):
    assert reason in said and "Traceback" not in said and str(path) in said, said
    assert len(said.strip().splitlines()) == 1, said
    return True
