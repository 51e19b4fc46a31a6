"""LIBERO tasks of the user's own, as docs/libero.md has them: its files and commands, and what is refused."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from embodied import evaluate, train
from embodied.core.errors import ConfigError
from embodied.core.types import EpisodeSpec
from embodied.envs import env_class, make_env
from embodied.envs.capabilities import choose_protocol
from embodied.envs.libero.config import LiberoConfig
from embodied.records.results import read_results

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # robosuite's, numba's and bddl's own
    pytest.mark.usefixtures("plain_scenes"),
    pytest.mark.skipif("not __import__('importlib.util').util.find_spec('libero')", reason="needs LIBERO"),
]
PAGE = (Path(__file__).parents[3] / "docs" / "libero.md").read_text().partition("## Your own task")[2].split("\n## ")[0]
INLINE = ["cluster.backend=inline", "eval.episodes=1", "eval.videos=0"]


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """The page's files, in the folder where the user is."""
    for text in re.findall(r"^```(?:lisp|python)\n(.*?)^```", PAGE, re.M | re.S):
        (tmp_path / text.splitlines()[0].strip("#; ")).write_text(text)
    task = (tmp_path / "my_task.bddl").read_text()
    (tmp_path / "lifted.bddl").write_text(task.replace("LIBERO_Floor_Manipulation", "Lifted"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("my_tasks", None)


def config(task="my_task.bddl", **options):
    return LiberoConfig(name="libero", task=task, num_envs=2, **options)


def begin(env, *seeds, state=-1):
    episodes = [EpisodeSpec(env.all_tasks[0], state, seed, number) for number, seed in enumerate(seeds)]
    return env.reset(options={"episodes": episodes})[0]


def test_a_bddl_file_is_a_task_with_its_instruction_and_placements_by_seed(mine):
    env = make_env(config(), 2)
    first = begin(env, 3, 4)
    assert first["instruction"] == ["put the ketchup in the basket"] * 2
    assert not np.allclose(first["state"][0], first["state"][1])
    assert np.array_equal(begin(env, 4, 3)["state"][::-1], first["state"])
    assert env.env_spec.max_episode_steps == 300
    env.close()


def test_a_class_decides_about_success_and_its_step_limit(mine):
    env = make_env(config("my_tasks:Lifted"), 2)
    begin(env, 3, 4)
    assert env.env_spec.max_episode_steps == 100
    row = env.row(0)
    row.scene.attach(row)
    ketchup = row.data.get_joint_qpos("ketchup_1_joint0")
    row.data.set_joint_qpos("ketchup_1_joint0", ketchup + np.array([0, 0, 0.5, 0, 0, 0, 0]))
    still = np.zeros((2, 7), np.float32)
    assert env.step(still)[4]["success"].tolist() == [True, False]
    env.close()


def test_own_initial_states_are_played_in_their_order(mine):
    plain = make_env(config(), 2)
    begin(plain, 3, 4)
    rows = [plain.row(number) for number in (0, 1)]
    states = []
    for row in rows:
        plain.row(0).scene.attach(row)
        states.append(row.scene.sim.get_state().flatten())
    plain.close()
    np.savez("my_states.npz", np.array(states))
    options = config(states_file="my_states.npz")
    assert choose_protocol(env_class(options), options, None).stored_states == 2
    env = make_env(options, 2)
    first, second = (begin(env, 9, 9, state=number)["state"] for number in (0, 1))
    assert np.array_equal(first[0], first[1]) and not np.allclose(first[0], second[0])
    env.close()
    np.save("narrow.npy", np.array(states)[:, :-1])
    with pytest.raises(ConfigError, match=r"its states have \d+ numbers, the simulation of .* has \d+"):
        make_env(config(states_file="narrow.npy"), 2)


def test_an_own_libero_task_is_trained_and_evaluated_from_another_folder(mine, monkeypatch, capsys):
    short = ["run.env_steps=null", "run.iterations=1", "env.num_envs=2", "env.max_episode_steps=16", *INLINE]
    small = ["algo.rollout_decisions=2", "algo.minibatch_size=4"]
    assert train.main(["recipe=libero_ppo", "env.task=my_task.bddl", *short, *small]) == 0
    (run,) = (mine / "runs").glob("libero_ppo-*")
    (mine / "elsewhere").mkdir()
    monkeypatch.chdir(mine / "elsewhere")
    assert evaluate.main([f"checkpoint={run}", *INLINE]) == 0
    found, _ = read_results(run / "eval/v000001-evaluate")
    assert found["protocol"]["name"] == "libero-own-v1" and found["protocol"]["max_episode_steps"] == 16
    assert read_results(run / "eval/v000001")[1] == read_results(run / "eval/v000001-evaluate")[1]


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("butter_1 - butter", "butter_1 - buter", "LIBERO cannot build .*buter"),
        ("(In ketchup_1", "(Inside ketchup_1", "LIBERO has no predicate 'inside'"),
        ("(:goal", "(:gaol", r"lacks \(:goal ...\)"),
        ("(:goal", "(:goal (", "its parentheses do not match"),
        ("(:ranges ((0.10", "(:yaw_rotation ((print(1) 0))) (:ranges ((0.10", "yaw_rotation"),
    ],
)
def test_a_wrong_task_file_is_refused_in_a_line(mine, capsys, old, new, says):
    text = (mine / "my_task.bddl").read_text()
    assert old in text
    (mine / "my_task.bddl").write_text(text.replace(old, new))
    assert evaluate.main(["checkpoint=random", "env.name=libero", "env.task=my_task.bddl", *INLINE]) == 2
    err = capsys.readouterr().err
    assert re.search(says, err) and err.count("\n") == 1, err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["env.task=my_tasks:Bare"], "name the file of its task in the class"),
        (["env.task=my_tasks:Twisted"], r"is a problem of lifted; write \(define \(problem Twisted\)"),
        (["env.task=my_tasks:Other"], "is no task class"),
        (["env.task=raises:Task"], "importing raises failed: RuntimeError: boom"),
        (["env.task=[my_task.bddl,libero_goal/0]"], "mixes tasks of your own with the benchmark's"),
        (["env.task=my_task.bddl", "env.initial_states=stored"], "has no stored states; set env.states_file"),
        (["env.task=my_task.bddl", "env.states_file=pickled.npy"], "pickles, which are not read"),
        (["env.task=my_task.bddl", "env.states_file=flat.npy"], r"it holds float64 \[3\], it must be numbers"),
        (["env.task=my_task.bddl", "env.states_file=nan.npy"], "state 1 is NaN or infinite"),
        (["env.task=my_task.bddl", "env.states_file=two.npz"], "which of its arrays. it has a, b and no 'states'"),
    ],
)
def test_an_invalid_task_or_states_file_is_refused_before_anything_starts(mine, capsys, arguments, says):
    (mine / "raises.py").write_text("raise RuntimeError('boom')\n")
    more = (
        '\n\nclass Bare(TASK_MAPPING["libero_floor_manipulation"]):\n    pass\n\n\nclass Twisted(Lifted):\n    pass\n'
    )
    with (mine / "my_tasks.py").open("a") as file:
        file.write(f"{more}\n\nclass Other:\n    pass\n")
    np.save("pickled.npy", np.array([{}], dtype=object))
    np.save("flat.npy", np.zeros(3))
    np.save("nan.npy", np.array([[0.0, 1.0], [np.nan, 1.0]]))
    np.savez("two.npz", a=np.zeros((1, 2)), b=np.zeros((1, 2)))
    assert evaluate.main(["checkpoint=random", "env.name=libero", *arguments, *INLINE]) == 2
    err = capsys.readouterr().err
    assert re.search(says, err) and err.count("\n") == 1, err
