"""The page on reasoning, followed from a user's folder: an env is checked, imitated, trained, evaluated, compared."""

import json
import re
from pathlib import Path

import pytest
from pages import Page, newest, runner
from tiny_language import publish

from embodied.config.recipe import load
from embodied.core.types import EpisodeResult
from embodied.reporting.success_stats import summarize
from embodied.reporting.transcripts import TranscriptWriter, read_transcripts

PAGE = Page("reasoning.md")
COMMANDS = [*PAGE.lines]
PPO = COMMANDS.pop(next(at for at, line in enumerate(COMMANDS) if "recipe=sums_ppo" in line))
TRAIN, CHECK, TRAIN_OWN, SAMPLED, GREEDY, REPORT, PERIODIC, *MORE = COMMANDS
PROFILE, PLAN, FOR_GPUS, MAKE_SMOL, SMOL = MORE
SHORT = ["run.iterations=1", "env.num_envs=8", "algo.groups=2", "algo.group_size=4", "eval.episodes=4"]
SHORT += ["cluster.backend=inline", 'placement={"sim,policy": "cpu:0", learner: "cpu:0"}']
IMITATE = (
    "python -m embodied.sft recipe={} sft.episodes=64 sft.epochs=1 sft.warmup_steps=0 env.num_envs=8 eval.episodes=4"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return PAGE.write(tmp_path_factory.mktemp("mine"))


@pytest.fixture
def here(folder, monkeypatch, capsys):
    return runner(folder, monkeypatch, capsys)


@pytest.fixture
def imitated(folder, here):
    """The folder of a short run of backwards_sft."""
    if not list(folder.glob("runs/backwards_sft-*")):
        here(IMITATE.format("./backwards_sft.yaml"), "cluster.backend=inline")
    return newest(folder, "backwards_sft")


def test_the_env_keeps_the_contract(here):
    assert "contract kept" in here(CHECK)


def test_a_policy_that_has_imitated_is_evaluated_and_its_answers_can_be_read(imitated, folder, here):
    said = here(SAMPLED.replace("backwards-DATE", "backwards_sft-DATE"), "eval.episodes=8", "cluster.backend=inline")
    assert "T=1: avg@4" in said and "pass@4" in said and "(2 prompts)" in said
    said = here(GREEDY.replace("backwards-DATE", "backwards_sft-DATE"), "eval.episodes=4", "cluster.backend=inline")
    assert "greedy: success" in said
    sampled, greedy = sorted(imitated.glob("eval/v*-evaluate*"))
    results = json.loads((sampled / "results.json").read_text())
    assert results["protocol"]["eval"]["temperature"] == 1.0 and "policy_version" in results
    assert set(results["overall"]["text"]) == {"prompts", "samples", "avg", "pass", "truncated", "tokens"}
    told = read_transcripts(sampled)
    assert len(told) == 8 and {one["turns"][0]["said"][-1] for one in told.values()} == {">"}
    assert "Conversations" in (sampled / "report.html").read_text()
    page = here(f"python -m embodied.report {sampled} {greedy}")
    assert "Answers to the same prompts" in Path(page).read_text()


def test_the_example_of_a_transcript_is_what_is_written(tmp_path):
    (text,) = (text for kind, text in PAGE.blocks if kind == "json")
    example = json.loads(text)
    success, reward = example["success"], example["reward"]
    result = EpisodeResult(example["index"], example["task"], 3, 7, 1, reward, success, success)
    with TranscriptWriter(tmp_path / "transcripts", "sim-0") as writer:
        writer.add(result, example["turns"])
    assert read_transcripts(tmp_path) == {3: example}


def test_the_figures_that_are_named_are_those_of_the_file():
    named = re.search(r"these are `overall.text`: ([^;]*);", PAGE.text)[1]
    answer = EpisodeResult(0, "t", 0, 0, 1, 1.0, True, True, truncated=False, tokens=2)
    assert re.findall(r"`(\w+)`", named) == list(summarize([answer])["overall"]["text"])


def test_the_env_is_trained_and_two_policies_are_compared(imitated, folder, here):
    here(TRAIN_OWN, *SHORT, f"run.start_from={imitated}")
    here(SAMPLED, "eval.episodes=8", "cluster.backend=inline")
    first, second = newest(folder, "backwards"), imitated
    pages = [max((run / "eval").iterdir()) for run in (first, second)]
    assert Path(here(f"python -m embodied.report {pages[0]} {pages[1]}")).is_file()
    row = json.loads((first / "metrics.jsonl").read_text().splitlines()[0])
    assert {"text/truncated", "text/tokens", "text/tokens_per_s"} <= row.keys()


@pytest.mark.parametrize("command", [TRAIN, PERIODIC, PPO])
def test_sums_are_trained(command, folder, here):
    if not list(folder.glob("runs/sft-sums_sft-*")):
        here(IMITATE.format("sums_sft"), "cluster.backend=inline")
    words = [*SHORT, f"run.start_from={newest(folder, 'sft-sums_sft')}"]
    if "periodic" in command:
        words = [word for word in words if not word.startswith(("placement", "cluster"))]
    assert "cut off" in here(command, *words)
    row = json.loads((newest(folder, "sums_*") / "metrics.jsonl").read_text().splitlines()[0])
    table = re.search(r"^\| look at \|.*?\n\n", PAGE.text, re.M | re.S)[0]
    kinds = ("faults/", "engine/", "groups/", "reward/", "critic/", "train/", "return", "success_once")
    assert [key for key in row if key.startswith(kinds) and f"`{key}`" not in table] == []


@pytest.mark.slow
def test_a_language_recipe_is_measured_and_planned(here):
    few = ["env.num_envs=8", "algo.groups=2", "algo.group_size=4"]
    assert "policy" in here(PROFILE.replace("profiling", "profiling.measure"), *few, "seconds=5")
    assert "collocated" in here(PLAN, *few)


def test_a_model_that_sees_is_planned_with_a_file_that_shows_pictures(folder, here, monkeypatch):
    """3.75 billion weights, those of the vision tower among them, as Qwen2.5-VL-3B's config.json says."""
    monkeypatch.setattr("embodied.envs.text.math.find_spec", lambda name: True)
    about = {"model_type": "qwen2_5_vl", "architectures": ["Qwen2_5_VLForConditionalGeneration"]}
    about |= {"hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 2}
    about |= {"intermediate_size": 11008, "vocab_size": 151936, "max_position_embeddings": 128000}
    about |= {"tie_word_embeddings": True, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}
    about |= {"vision_config": {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16}}
    about["vision_config"] |= {"out_hidden_size": 2048, "fullatt_block_indexes": [7, 15, 23, 31]}
    (folder / "SEES").mkdir()
    (folder / "SEES" / "config.json").write_text(json.dumps(about))
    (folder / "a.png").write_bytes(b"")
    line = {"question": "<image>Find x.", "images": ["a.png"]}
    lines = [json.dumps(line | {"question": f"<image>Find {name}.", "answer": "1"}) for name in "abc"]
    (folder / "shown.jsonl").write_text("\n".join(lines))
    command = "python -m embodied.train recipe=geometry_grpo env.file=shown.jsonl --dry-run cluster.machines=8xGPU"
    said = here(f"{command} policy.pretrained=SEES")
    assert "3.75 billion weights, 3.75 of them trained" in said and "8 x policy + learner on gpu:0-7" in said


@pytest.mark.parametrize("recipe", ["math_grpo", "math_ppo"])
def test_a_model_that_is_not_here_is_planned_for_machines_that_are_not_here(recipe, folder, here, monkeypatch):
    monkeypatch.setattr("embodied.envs.text.math.find_spec", lambda name: True)  # nothing is scored in a dry run
    about = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True}
    about |= {"num_hidden_layers": 28, "hidden_size": 1536, "num_attention_heads": 12, "num_key_value_heads": 2}
    about |= {"intermediate_size": 8960, "vocab_size": 151936, "max_position_embeddings": 32768}
    (folder / "MODEL").mkdir(exist_ok=True)
    (folder / "MODEL" / "config.json").write_text(json.dumps(about))
    lines = [json.dumps({"question": f"1 + {number}?", "answer": str(1 + number)}) for number in range(3)]
    (folder / "questions.jsonl").write_text("\n".join(lines))
    said = here(FOR_GPUS.replace("math_grpo", recipe))
    assert "32 x sim on cores" in said and "8 x policy + learner on gpu:0-7" in said
    assert "gpu:0 and 7 more alike" in said and "in turns (rollout: vLLM 51.1; update: learner 32" in said


def test_the_small_published_model_is_made_by_the_script_and_trained(folder, here):
    script = Path(__file__).parents[1] / MAKE_SMOL.split()[1]
    assert str(load(["recipe=smol_grpo"]).config.policy.pretrained) in script.read_text()
    publish(folder / "models" / "SmolLM2-135M-Instruct", "llama", tied=True)
    assert "tokens an answer" in here(SMOL, *SHORT, "policy.train_layers=1", "algo.filter=none")
