"""Every command of the README and of docs/ is accepted, short ones run, and what pages name is there."""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib

import pytest
from pages import ROOT, Page, lacks, newest, runner
from test_pages import PAGES as FOLLOWED

from embodied.algorithms.config import PRESETS, GRPOConfig
from embodied.benchmark import MODES
from embodied.config.read import leaves, root
from embodied.config.recipe import RunConfig, load
from embodied.config.recipe_files import recipe_names
from embodied.core.types import EpisodeResult
from embodied.core.yaml_text import read_yaml
from embodied.envs import env_class
from embodied.envs.gym.config import GymConfig
from embodied.envs.maniskill.config import ManiSkillConfig
from embodied.envs.pointmass.config import PointMassConfig
from embodied.envs.text.config import PicturesConfig, SumsConfig, ToolsConfig
from embodied.placement import make_plan
from embodied.placement.topology import read_topology
from embodied.records.results import COLUMNS
from embodied.records.success_stats import summarize
from embodied.records.transcripts import TranscriptWriter, read_transcripts
from embodied.run.policy_source import first_run

PAGES = [Page("README.md"), *(Page(path.name) for path in sorted((ROOT / "docs").glob("*.md")))]
ALL = "\n".join(page.text for page in PAGES)
TAKES_A_RECIPE = re.compile(r"python -m embodied\.(train|sft|collect|evaluate) (.*)")
OF_A_FOLDER = (
    r"(resume|checkpoint|join|pretrained|env\.python|data|statistics)=\S*[/A-Z]|=FOLDER|=models/|seeds=|program="
)
SHORT = ["run.iterations=1", "eval.episodes=2", "eval.videos=0", "cluster.backend=inline"]
IMITATE = ["sft.episodes=64", "sft.epochs=1", "sft.warmup_steps=0", "env.num_envs=8", *SHORT[1:]]
FEW_ENVS = ["env.num_envs=4", "env.max_episode_steps=8"]
FEW_DECISIONS = [*FEW_ENVS, "algo.rollout_decisions=8", "algo.minibatch_size=16"]
FEW_GROUPS = [*FEW_ENVS, "algo.groups=2", "algo.group_size=2", "algo.minibatch_size=8"]
RUN_ELSEWHERE = (
    r" cluster\.| seeds=| run\.start_from|[ =]my_|=sums_|=smol_|=gsm8k_|=\./|program=|pretrained|-DATE|demos/|--|"
    r"ppo_(gpu|rgb)"
)


def commands(pattern, but):
    found = {(page.name, line) for page in PAGES for line in page.commands if re.match(pattern, line)}
    return sorted((name, line) for name, line in found if not re.search(but, line))


@pytest.mark.parametrize(("name", "command"), commands(TAKES_A_RECIPE, OF_A_FOLDER + "|--help"))
def test_a_command_says_what_its_recipe_takes(name, command, tmp_path, monkeypatch):
    monkeypatch.chdir(Page(name).write(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    entry, words = TAKES_A_RECIPE.match(command).groups()
    load([word for word in shlex.split(words) if not word.startswith("--")], entry=entry)
    for module in [
        key for key, one in sys.modules.items() if str(getattr(one, "__file__", "")).startswith(str(tmp_path))
    ]:
        del sys.modules[module]  # another page has a file of this name


def is_followed(name, command):
    """True if the command is a step of its page in test_pages.py."""
    return any(
        re.search(rf"python -m embodied\.{step.begins}", command)
        for step in FOLLOWED.get(name, ())
        if step.begins[-1] != "("
    )


def slow_where_it_takes_long(command):
    marks = [pytest.mark.slow] if re.search("libero|robosuite", command) else []
    return pytest.param(command, marks=[*marks, pytest.mark.skipif(bool(lacks(command)), reason=lacks(command))])


@pytest.mark.parametrize(
    "command",
    [
        slow_where_it_takes_long(line)
        for line in dict.fromkeys(
            line for name, line in commands(r"python -m embodied\.train ", RUN_ELSEWHERE) if not is_followed(name, line)
        )
    ],
)
def test_a_training_command_runs(command, tmp_path, monkeypatch, capsys):
    here, words = runner(tmp_path, monkeypatch, capsys), shlex.split(command)[3:]
    loaded = load(words)
    short = [*SHORT, *(FEW_GROUPS if loaded.config.algo.whole_episodes else FEW_DECISIONS)]
    if first := first_run(loaded):  # otherwise this command would do so, at full length
        here(f"python -m embodied.{first.command} {shlex.join(first.arguments)}", *IMITATE)
        short.append(f"run.start_from={newest(tmp_path, f'sft-{first.recipe}')}")
    named = {word.partition("=")[0] for word in words}
    here(command, *(word for word in short if word.partition("=")[0] not in named))


def test_every_key_that_a_page_names_is_there():
    keys = {key for key, _, _ in leaves(root(RunConfig))}
    sections = {key.partition(".")[0] for key in keys if "." in key}
    named = set(re.findall(rf"`((?:{'|'.join(sections)})\.\w+)[=`]", ALL)) - {
        "run.json",
        "policy.onnx",
        "policy.save_published",
    }  # files, a method
    assert len(named) > 100 and not named - keys
    faults = {key for key in named if key.startswith("faults.")}
    assert faults == {key for key in keys if key.startswith("faults.")}


def test_every_recipe_that_a_page_names_is_there():
    table = re.findall(r"^\| `(\w+)`", PAGES[0].text, re.M)
    named = {*re.findall(r"recipe=(\w+)(?![\w./*])", ALL), *table} - {
        "NAME",
        "pointmas_ppo",
    }  # a mistake that a page shows
    assert len(named) > 30 and not named - {*recipe_names()}


def test_the_table_of_relatives_of_grpo_is_that_of_the_presets():
    page = Page("algorithms.md").text
    for name, preset in PRESETS.items():
        (row,) = re.findall(rf"^\| `{re.escape(name)}` \|.*\| `([^`]*)` \|$", page, re.M)
        told = dict(word.split("=") for word in row.split())
        assert {key: str(getattr(GRPOConfig(name=name), key)) for key in told} == told
        assert preset.keys() <= told.keys()


@pytest.mark.parametrize("module", sorted(set(re.findall(r"-m (benchmarks\.\w[.\w]*)", ALL)) - {"benchmarks.COMMAND"}))
def test_a_benchmark_that_is_named_is_there(module):
    assert (ROOT / f"{module.replace('.', '/')}.py").is_file()


def test_programs_that_the_results_call_still_in_the_tree_are_there():
    starred = re.findall(r"`(?:python -m benchmarks\.)?(\w+)[^`|]*` \\\*", Page("results.md").text)
    assert len(starred) >= 7 and all((ROOT / "benchmarks" / f"{name}.py").is_file() for name in starred), starred


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere_and_programs_compile(page):
    folder = ROOT if page.name == "README.md" else ROOT / "docs"
    for target, _, anchor in (link.partition("#") for link in re.findall(r"\]\((?!https:)([^)]+)\)", page.text)):
        path = folder / target if target else folder / page.name
        assert path.is_file(), target
        assert not anchor or anchor in anchors(path.read_text()), f"{target}#{anchor}"
    for kind, text in page.blocks:
        if kind == "python":
            compile(text, page.name, "exec")


def anchors(text):
    """The anchors of its headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)", text, re.M)
    return {re.sub(r"[^\w\- ]", "", re.sub(r"[`*]", "", title).lower()).replace(" ", "-") for title in titles}


def test_settings_in_the_readmes_table_are_valid():
    for setting in re.findall(r"`(env\.\S+=[^`]+)`", PAGES[0].text):
        load([f"recipe={'gym_ppo' if 'gym:' in setting else 'maniskill_ppo'}", setting])


def test_the_protocols_and_columns_of_evaluations_are_those_there_are():
    page = Page("evaluation.md").text
    others = {"libero-v1", "libero-pro-v1", "libero-warp-v1", "envpool-v1", "metaworld-v1"}
    named = set(re.findall(r"`([a-z-]+-v\d+)` \|", page)) - others
    envs = [ManiSkillConfig(), PointMassConfig(name="pointmass"), GymConfig(name="gym:CartPole-v1")]
    assert named == {protocol.name for config in envs for protocol in env_class(config).protocols(config)}
    assert tuple(re.search(r"has the columns `([^`]*)`", page)[1].replace("\n", " ").split(", ")) == COLUMNS


def test_the_text_envs_and_tasks_of_their_page_are_those_there_are():
    table = dict(re.findall(r"^\| `([\w:]+)` \| (.*) \|", Page("text_envs.md").text, re.M))
    named = {name.partition(":")[0] for name in table}
    assert named == {"sums", "tools", "sort", "pictures", "math", "mixture", "reasoning_gym", "verifiers"}
    for name, options in {"sums": SumsConfig, "tools": ToolsConfig, "pictures": PicturesConfig}.items():
        assert all(task in table[name] for task in options.TASKS)


def test_transcripts_and_their_figures_are_as_the_page_says(tmp_path):
    page = Page("reasoning.md")
    example = json.loads(next(text for kind, text in page.blocks if kind == "json"))
    success, reward = example["success"], example["reward"]
    result = EpisodeResult(example["index"], example["task"], 3, 7, 1, reward, success, success)
    with TranscriptWriter(tmp_path / "transcripts", "sim-0") as writer:
        writer.add(result, example["turns"])
    assert read_transcripts(tmp_path) == {3: example}
    named = re.search(r"these are `overall.text`: ([^;]*);", page.text)[1]
    answer = EpisodeResult(0, "t", 0, 0, 1, 1.0, True, True, truncated=False, tokens=2)
    assert re.findall(r"`(\w+)`", named) == list(summarize([answer])["overall"]["text"])


def test_placements_of_their_page_can_be_read(tmp_path):
    page = Page("placement.md").text + Page("placement_reference.md").text
    (tmp_path / "lab.yaml").write_text(re.search(r"```yaml\n(.*?)```", page, re.S)[1])
    assert [node.name for node in read_topology(str(tmp_path / "lab.yaml")).nodes] == ["big-0", "big-1", "desk"]
    assert make_plan(read_yaml(re.search(r"`placement='(.*?)'`", page)[1]), (0, 1), 8).count("sim") == 2
    assert {*re.findall(r"^\| `(\w+)` \|", page[: page.index("\n## ")], re.M)} == {*MODES, "auto"}


def test_the_facts_below_the_title_are_true(request):
    about = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    license_, pythons, _, tests = re.findall("`(.*?)`", re.search("^`.*`$", PAGES[0].text, re.M)[0])
    assert license_ == about["license"]
    said = [f"Programming Language :: Python :: {one}" for one in re.findall(r"3\.\d+", pythons)]
    assert said == [one for one in about["classifiers"] if ":: 3." in one]
    if request.config.getoption("-m") == "not slow and not chaos" and not request.config.getoption("-k"):
        whole = [item for item in request.session.items if item.path.is_relative_to(ROOT / "tests")]
        assert len(whole) < 1000 or len(whole) >= int(re.sub(r"\D", "", tests)), "fewer tests than the README says"


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make ([\w-]+)", PAGES[0].text + (ROOT / "CONTRIBUTING.md").read_text(), re.M):
        assert re.search(f"^{target}:", makefile, re.M), target


@pytest.mark.parametrize("flags", ["avx avx2 fma", "avx avx2 avx512f"])
def test_continuous_integration_runs_all_tests_and_those_of_numbers_with_the_kernels_of_other_processors(
    flags, tmp_path
):
    commands = re.findall(r"^(?:exec )?make ([\w -]+?)(?:  #.*)?$", (ROOT / ".ci" / "run").read_text(), re.M)
    assert commands == ["-j2 lint vllm", "test", "test-numbers"]
    processor = tmp_path / "cpuinfo"
    processor.write_text(f"flags : {flags}\n")
    asked = ["make", "-n", "test-numbers", f"CPUINFO={processor}"]
    bare = {"PATH": os.environ["PATH"]}  # without what the `make` that runs this test was given
    lines = subprocess.run(asked, cwd=ROOT, env=bare, capture_output=True, text=True, check=True).stdout.splitlines()
    rounds = [line for line in lines if '-m "numbers and not slow and not chaos"' in line]
    kernels = {re.search(r"ATEN_CPU_CAPABILITY=(\w+)", line)[1] for line in rounds}
    assert kernels == {"default", *(["avx2"] if "avx512" in flags else [])}
    assert sum(max(1, int(re.findall(r" -n (\d)", line)[-1])) for line in rounds) == 2


def test_every_measurement_names_its_commit():
    tables = re.findall(r"^\|.*\| commit, day \|\n\|[- |]+\|\n((?:\|.*\n)+)", Page("results.md").text, re.M)
    rows = [row for table in tables for row in table.splitlines()]
    assert len(tables) > 5 and all(re.search(r"\b[0-9a-f]{8}\b|the same|tested", row.split("|")[-2]) for row in rows)


def test_every_page_is_reached_from_the_readme():
    assert {*re.findall(r"docs/(\w+\.md)", Page("README.md").text), *re.findall(r"\((\w+\.md)", ALL)} >= {
        page.name for page in PAGES if page.name != "README.md"
    }
