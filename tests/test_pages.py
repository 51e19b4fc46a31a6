"""Pages of the documents, followed from a user's folder: their files are written, and their commands run in order."""

import json
import re
import shlex
import sys
from importlib.util import find_spec
from typing import NamedTuple

import bare_environment
import pytest
import tiny_vla
from pages import Page, apart, lacks, runner
from tiny_language import publish
from verifiers_stand_in import stand_in

from embodied.records.timeline import read_trace

ONE_HOST = """placement='{"sim,policy": "cpu:0", learner: "cpu:0"}'"""
INLINE = f"cluster.backend=inline {ONE_HOST}"
SHORT = {  # what makes a command short, unless its step says otherwise
    "train": f"run.iterations=1 eval.episodes=2 eval.videos=0 {INLINE}",
    "evaluate": "eval.episodes=4 eval.videos=1 cluster.backend=inline",
    "collect": "collect.episodes=4 env.num_envs=2 cluster.backend=inline",
    "sft": f"sft.epochs=1 eval.episodes=2 eval.videos=0 {INLINE}",
    "profiling": "seconds=20",
    "benchmark": "rounds=1 seconds=2",
}


class Step(NamedTuple):
    """Commands of a page (`train recipe=sums`), or a program (`import embodied`), and what they print."""

    begins: str
    told: str | re.Pattern | tuple[str, ...] = ()
    more: str = ""  # options instead of the page's
    code: int = 0
    slow: bool = False
    swap: tuple[str, str] = ("(?!)", "")  # pattern and what stands for it


FEW = "env.num_envs=4 algo.rollout_decisions=8 algo.minibatch_size=16"
ROBOT = "env.num_envs=8 algo.rollout_decisions=5 algo.minibatch_size=20 env.max_episode_steps=6 eval.videos=1"
GROUPS = "env.num_envs=8 algo.groups=2 algo.group_size=4"
BRIEF = "run.iterations=2 eval.episodes=2 eval.videos=0 run.start_from=null run.env_steps=null"
SEEDS = "seeds=0-1 run.iterations=2 eval.episodes=4 env.num_envs=4 algo.minibatch_size=32"
WORDS = f"{GROUPS} eval.episodes=4"
IMITATED = (
    "run.start_from=runs/sft-sums_sft-DATE"  # else a command would imitate first, for longer than a test may take
)
IMITATE = "sft.episodes=64 sft.warmup_steps=0 env.num_envs=8 eval.episodes=4"
STATES = "env.max_episode_steps=20 algo.rollout_decisions=2 algo.minibatch_size=16"
WARMED = "run.start_from=runs/so100-DATE run.iterations=2 algo.critic_warmup=1"
WARP = "env.num_envs=2 algo.minibatch_size=4 eval.episodes=2 eval.videos=1"
OFT = re.search(
    r"`libero_grpo_openvla_oft` \| (.*) on cores \| (.*) GPUs \| (.*) \| (.*) \|", Page("placement_reference.md").text
)
PAGES = {
    "README.md": [
        Step("train recipe=pointmass_ppo$", "finished after"),
        Step("evaluate checkpoint=runs/pointmass", "success_once"),
        Step("report runs/pointmass", "report.html"),
        Step("train resume=", "resumed from", "run.iterations=3"),
        Step("python -m embodied", "pointmass_ppo"),
        Step("train --help lr", "algo.lr"),
        Step("train .* --dry-run", "hybrid"),
        Step("doctor", slow=True),
        Step("list$", "pointmass_ppo"),
        Step("embodied.train(", re.compile(r" [\d.]+ [\d.]+$"), swap=('=(200|40)"', '=4", "cluster.backend=inline"')),
    ],
    "first_ten_minutes.md": [
        Step("train recipe=pointmass_ppo$", "finished after"),
        Step("train resume=", "resumed from", "run.iterations=3"),
        Step("evaluate checkpoint=runs/pointmass", "success_once"),
    ],
    "own_task.md": [
        Step(
            "check env.task=my_tasks",
            (
                "contract kept",
                "batched equals single envs",
                "40 an episode",
                "base_camera (128x128), render_camera (512",
            ),
        ),
        Step("train .*run.name=ring", "physics cpu_batched", ROBOT),
        Step("evaluate checkpoint=runs/ring", "success_once", "eval.videos=0"),
        Step("benchmark", ("collocated", "bench.html"), ROBOT, slow=True),
        Step("plan", "plan.html", ROBOT, slow=True),
        Step(
            "check .*my_rewards",
            ("controls arm_only (chosen)", "robots fist_panda (chosen)", "rewards near (chosen)", "actions 7 numbers"),
            slow=True,
        ),
        Step("train .*run.name=fist", "success_once", ROBOT, slow=True),
        Step("train .*run.name=effort", "success_once", ROBOT),
        Step(
            "train .*run.name=effort", "got an unexpected keyword argument 'price'", "env.reward_kwargs.price=1", code=2
        ),
        Step(
            "check env.name=my_gym:Slide env.max_episode_steps=40$",
            ("state of 2 numbers", "success reported in every step", "contract kept"),
        ),
        Step(
            "check env.name=my_gym:Slide env.max_episode_steps=40$",
            "set env.max_episode_steps=",
            "env.max_episode_steps=null",
            code=2,
        ),
        Step("train .*run.name=slide", "success_once", ROBOT),
        Step("check_lift.py"),
        Step("train .*my_sims:Lift", "success_once"),
        Step("train recipe=my_lift.yaml", "success_once"),
        Step("collect .*my_script:ScriptedLift", "success_once 100.0%"),
        Step("check env.name=my_gym.*env.python", ("interpreter python 3", "success reported", "contract kept")),
        Step("train .*run.name=apart", "success_once", ROBOT, slow=True),
        Step("evaluate checkpoint=runs/apart", "success_once", slow=True),
        Step(
            "check env.name=my_door",
            ("state of 3 numbers, images of eye_front [40, 40, 3], an instruction", "6 choices", "contract kept"),
        ),
        Step("train .*run.name=door", "success_once", ROBOT),
        Step("train .*run.name=door", "success_once", f"{ROBOT} policy.name=mlp"),
        Step("check env.name=my_switches", ("actions 6 choices", "contract kept")),
        Step("train .*run.name=switches", "success_once", ROBOT),
        Step("check env.name=my_camera", ("images of top [64, 64, 3]", "contract kept")),
        Step("train .*run.name=dot", "success_once", ROBOT),
    ],
    "cluster.md": [Step("train .*backend=ray$", "finished", f"{FEW} cluster.backend=ray placement=auto", slow=True)],
    "comparing.md": [
        Step("train .*seeds=0-4$", ("2 of 2 runs finished", "IQM of 2 seeds"), SEEDS, slow=True),
        Step("train .*seeds=0-4$", "which exists already", SEEDS, slow=True),
        Step("train .*--dry-run", ("5 runs", "2 at once, each on cores of its own")),
        Step("sweep .*algo.lr=1e-4", "6 of 6 runs finished", f"{SEEDS} cluster.backend=inline", slow=True),
        Step("sweep .*policy.hidden", "4 of 4 runs finished", f"{SEEDS} seeds=0 cluster.backend=inline", slow=True),
        Step(
            "embodied.sweep(",
            ("algo.lr=0.001 {'iqm'", "'seeds': 2}"),
            slow=True,
            swap=('"seeds=0-1"', f"*{[*SEEDS.split(), 'eval.videos=0', 'cluster.backend=inline']}"),
        ),
        Step("report", "html", slow=True),
    ],
    "sharing.md": [
        Step("share .*--dry-run", "pointmass_ppo-2 owns"),
        Step("share .*--plan", "python -m embodied.profiling recipe=pointmass_ppo", code=2),
        Step("train .*at_once=shared", "at once, each on devices that they lend to each other"),
        Step("share pointmass_ppo sums_grpo$", "2 of 2 runs finished", swap=("share ", f"share {BRIEF} "), slow=True),
        Step("share resume=", "2 of 2 runs finished", slow=True),
        Step("share join=", "no command is running them", code=1, slow=True),
    ],
    "export.md": [
        Step("train recipe=pointmass_ppo", "success_once"),
        Step("export .*=reach_torch", ("actions differ by at most", "graph.json")),
        Step("export .*=reach_onnx", "policy.onnx")
        if find_spec("onnxruntime")
        else Step("export .*=reach_onnx", "[onnx]'", code=2),
        Step("evaluate", "comparison.html"),
        Step("drive.py", "(1, 1, 2)"),
        Step("push runs/reach", ("license: mit", "nothing was uploaded")),
        Step("train recipe=libero_grpo_smolvla", "success_once", f"policy.chunk=8 {INLINE}", slow=True),
        Step("export .*=smolvla_torch", "graph.json", slow=True),
        Step("push runs/smolvla", "nothing was uploaded", slow=True),
    ],
    "demonstrations.md": [
        Step("collect recipe=pointmass_ppo", "success_once"),
        Step("sft recipe=pointmass_ppo", "success_once", "sft.minibatch_size=16"),
        Step("train recipe=pointmass_ppo run", "success_once"),
        Step("train recipe=pointmass_ppo .*imitation", "success_once"),
        Step("train recipe=pointmass_ppo .*dagger", "success_once"),
        Step("collect .*expert=planner", "success_once 100.0%", "collect.noise=0 collect.episodes=2", slow=True),
    ],
    "small_arm.md": [
        Step("collect recipe=pickcubeso100_sft", "success_once"),
        Step("sft recipe=pickcubeso100_sft", "success_once", "sft.epochs=4 sft.minibatch_size=32"),
        Step("train recipe=pickcubeso100_ppo", "success_once", f"{STATES} {WARMED}"),
    ],
    "versions.md": [Step("python -m embodied --version", re.compile(r"^\d+\.\d+\.\d+$"))],
    "evaluation.md": [
        Step("evaluate checkpoint.*(pointmass_ppo-DATE|=pointmass)", "results.json"),  # servers: another test
        Step("evaluate .*maniskill", "results.json", slow=True),
        Step("DatasetWriter(", swap=("image,", "np.zeros((64, 64, 3), np.uint8),")),
        Step("read_dataset(", "push the cube True (2, 4) (2, 2)", swap=('"dataset"', '"mine"')),
    ],
    "vla.md": [
        Step("collect .*out=demos/push", slow=True),
        Step("sft .*sft.data=demos/push", slow=True, more="env.num_envs=2"),
        Step("train .*pushcube_grpo", slow=True, more="algo.groups=1 algo.filter=none env.num_envs=8"),
        Step("evaluate .*pushcube_grpo", "videos/", slow=True, more="env.num_envs=2"),
        Step("train .*smolvla_tiny$", "smolvla, random", f"{GROUPS} algo.filter=none run.start_from=null"),
    ],
    "own_policy.md": [
        Step("train recipe=my_linear", "success_once"),
        Step("evaluate checkpoint=.*my_nets:Linear,random", "comparison.html"),
        Step("train .*my_seeing", "success_once", "eval.videos=1"),
        Step("check env.name=pointmass", "state of 6 numbers"),
        Step("check env.task=PushCube-v1", "agent.qpos 9, agent.qvel 9", slow=True),  # as own_task.md does
    ],
    "simulators.md": [
        Step("train recipe=envpool_ppo$", ("envpool-v1", "success_once"), ROBOT),
        Step("train .*envpool:Ant-v5", "return", ROBOT, slow=True),
        Step("collect recipe=metaworld_ppo", "expert: success_once 100.0%", "collect.episodes=1 env.num_envs=1"),
        Step("sft recipe=metaworld_ppo", "success_once", "env.max_episode_steps=6 env.num_envs=2"),
        Step("train recipe=metaworld_ppo", "success_once", ROBOT.replace("videos=1", "videos=0")),
        Step("evaluate checkpoint=runs/metaworld_ppo", "metaworld-v1", "eval.videos=0 eval.episodes=2"),
    ],
    "placement.md": [
        Step("plan profile=published", re.compile("wins|are predicted equal")),
        Step("profiling recipe=pointmass_ppo", more=FEW, slow=True),
        Step("plan recipe=pointmass_ppo", "plan.html", FEW, slow=True),
        Step("benchmark recipe=pointmass_ppo", "bench.html", FEW, slow=True),
        Step(
            "embodied.benchmark(",
            re.compile("collocated|hybrid"),
            slow=True,
            swap=('"rounds=7"', f'"rounds=1", *{FEW.split()}'),
        ),
        Step(
            "train .*cluster.memory_gb",
            "finished after",
            "placement='{sim: cpu:0, policy: cpu:1, learner: cpu:1}' run.iterations=2 cluster.backend=local",
            slow=True,
        ),
    ],
    "placement_reference.md": [
        Step(
            "train recipe=libero_grpo_openvla_oft",
            (
                f"{OFT[1]} x sim on cores",
                f"{OFT[2]} x policy + learner on gpu:0-7",
                *OFT[3].split(", "),
                f"= {OFT[4]} of",
            ),
            slow=True,
        )
    ],
    "text_envs.md": [
        Step("check env.name=my_envs", ("contract kept", "held out 200 prompts")),
        Step("train .*my_envs:Doubling", "task my_envs:Doubling", "run.start_from=null"),
        Step("check env.name=my_pictures", "contract kept"),
        Step("check env.name=my_guesses", ("contract kept", "at most 10 answers")),
        Step("train .*env.rewards", "finished after", f"run.start_from=null {GROUPS}"),
        Step("check env.name=math", ("1/2 + 1/3", "contract kept")),
        Step("train recipe=./my_mixture", "task mixture mixture"),
        Step("check env.name=verifiers", ("held out 0?", "contract kept")),
        Step("train .*verifiers:", "verifiers:my_vf_sums", "run.start_from=null --dry-run"),
        Step("train recipe=(calc|search|python)_grpo", "sim + policy on cores", "--dry-run"),
        Step("check env.name=my_box", "contract kept"),
    ],
    "reasoning.md": [
        Step("check env.name=my_text", "contract kept"),
        Step("train recipe=sums_grpo$", "cut off", f"{WORDS} {IMITATED}"),
        Step("train recipe=./backwards", "cut off", f"{WORDS} {IMITATED.replace('sft-sums', 'backwards')}"),
        Step("train recipe=sums_ppo", "cut off", f"{WORDS} {IMITATED}"),
        Step("evaluate .*temperature=1", ("T=1: avg@4", "pass@4", "(2 prompts)"), "eval.episodes=8"),
        Step("evaluate .*temperature=0", "greedy: success"),
        Step("report runs/backwards", "comparison.html", swap=(r"v0000\d\d", "v000001")),
        Step("train .*schedule=periodic", "cut off", f"{WORDS} {IMITATED} placement=auto cluster.backend=local"),
        Step("profiling", "policy", f"{GROUPS} seconds=5", slow=True),
        Step("plan", "collocated", GROUPS, slow=True),
        Step(
            "train recipe=math_grpo .*jsonl --dry-run",
            (
                "32 x sim on cores",
                "8 x policy + learner on gpu:0-7",
                "in turns (rollout: vLLM 51.1; update: learner 33",
            ),
        ),
        Step("train .*tensor_parallel=4", ("2 x policy on gpu:0-7, 4 each", "vLLM 12.8")),
        Step("train recipe=smol_grpo", "tokens an answer", f"{WORDS} policy.train_layers=1 algo.filter=none"),
    ],
    "gsm8k.md": [
        Step(
            "train recipe=gsm8k_grpo --dry-run",
            (
                "8 x policy + learner on gpu:0-7",
                "rollout: policy 16.4 + vLLM 56.4; update: learner 67.9",
                # 2 x (7.6e9 x 1536 + 36 x 4096 x 1536^2) x 4 passes x 2048 answers, of 8 x 989e12 a second
                "2,048 answers of full length take at least 25 s an iteration",
            ),
        ),
        Step(
            "train .*cache_gb=70 .*--dry-run",
            "try learner.checkpoint_activations=true policy.cache_gb=45",
            "policy.cache_gb=70",
            code=2,
        ),
        Step("train recipe=./gsm8k.yaml", ("evaluation", "math500"), "--dry-run", slow=True),
        Step("train .*(schedule=async|tensor_parallel|dapo|reinforce)", "of 80 GB", "--dry-run", slow=True),
        Step("train .*lora_rank", ("1 x policy + learner on gpu:0", "0.0873 of them"), "--dry-run", slow=True),
        Step("make_problems.py", slow=True),
        Step("train recipe=./small_grpo", "task math math", "policy.train_layers=1 --dry-run", slow=True),
    ],
    "libero.md": [
        Step("train .*backend=warp", ("physics MuJoCo Warp", "libero-warp-v1"), f"{STATES} {WARP}", slow=True),
        Step("evaluate checkpoint=runs/warp-DATE$", "libero-v1", slow=True),
        Step("evaluate .*backend=warp", "libero-warp-v1", "eval.episodes=1 eval.videos=0 env.num_envs=1", slow=True),
        Step("train .*renderer=warp", "+warp-pictures", f"{STATES} env.image_size=48", slow=True),
        Step("evaluate checkpoint=runs/drawn-DATE$", "was trained with env.renderer='warp' (now 'auto')", slow=True),
        Step("evaluate .*renderer=warp", "libero-v1+warp-pictures", "eval.episodes=1 env.num_envs=1", slow=True),
        Step("evaluate .*task=my_task.bddl eval", "results.json", slow=True),
        Step("train .*task=my_task.bddl", "success_once", STATES, slow=True),
        Step("check .*task=my_task.bddl", "contract kept", slow=True),
        Step("profiling .*task=my_task.bddl", more=STATES, slow=True),
        Step("plan .*task=my_task.bddl", "plan.html", STATES, slow=True),
        Step("benchmark .*task=my_task.bddl", "bench.html", f"{STATES} modes=collocated", slow=True),
        Step("make_states.py", slow=True),
        Step("evaluate .*states_file", "results.json", slow=True),
        Step("evaluate .*my_tasks:Lifted", "results.json", slow=True),
        Step("train .*my_tasks:Lifted", "success_once", STATES, slow=True),
        Step(
            "check env.task=my_nudge",
            ("contract kept", "robot0_proprio-state 32, object-state 10"),
            "env.max_episode_steps=6",
            slow=True,
        ),
        Step("train .*my_nudge", "success_once", STATES, slow=True),
        Step("evaluate .*nudge", "results.json", slow=True),
        Step("train .*UR5e", "success_once", STATES, slow=True),
    ],
}


def prepare(folder, name):
    """What a page takes for granted."""
    if name == "gsm8k.md":
        publish(folder / "models/SmolLM2-135M-Instruct", "llama", tied=True)
        about = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": False}
        about |= {"num_hidden_layers": 36, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
        about |= {"head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936, "max_position_embeddings": 40960}
        (folder / "Qwen/Qwen3-8B").mkdir(parents=True)
        (folder / "Qwen/Qwen3-8B/config.json").write_text(json.dumps(about))
        for name, numbers in {"train": range(60), "test": range(60, 90)}.items():
            rows = [json.dumps({"question": f"{n} + 1?", "answer": f"It is {n + 1}.\n#### {n + 1}"}) for n in numbers]
            (folder / f"{name}-of-the-hub.jsonl").write_text("\n".join(rows))
    if name == "text_envs.md":
        (folder / "questions.jsonl").write_text(next(text for kind, text in Page(name).blocks if kind == "json"))
        (folder / "verifiers-env/bin").mkdir(parents=True)
        stand_in(folder / "verifiers-env/bin/python")
    if name == "export.md":
        tiny_vla.publish(folder / "models/smolvla", "smolvla", tiny_vla.ARM)
    if name == "own_task.md":
        bare_environment.make(folder / "simulator_env")
    if name == "libero.md":
        task = (folder / "my_task.bddl").read_text()
        (folder / "lifted.bddl").write_text(task.replace("LIBERO_Floor_Manipulation", "Lifted"))
    if name == "reasoning.md":
        publish(folder / "models/SmolLM2-135M-Instruct", "llama", tied=True)
        about = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True}
        about |= {"num_hidden_layers": 28, "hidden_size": 1536, "num_attention_heads": 12, "num_key_value_heads": 2}
        about |= {"intermediate_size": 8960, "vocab_size": 151936, "max_position_embeddings": 32768}
        (folder / "MODEL").mkdir()
        (folder / "MODEL/config.json").write_text(json.dumps(about))
        lines = [json.dumps({"question": f"1 + {number}?", "answer": str(1 + number)}) for number in range(3)]
        (folder / "questions.jsonl").write_text("\n".join(lines))


BEFORE = {  # what a page's commands follow on
    "comparing.md": [Step("python -m embodied.train recipe=pointmass_ppo")],
    "evaluation.md": [Step("python -m embodied.train recipe=pointmass_ppo")],
    "reasoning.md": [
        Step("python -m embodied.sft recipe=sums_sft", more=IMITATE),
        Step("python -m embodied.sft recipe=./backwards_sft.yaml", more=IMITATE),
    ],
}


@pytest.fixture(scope="module")
def begun():
    """Page -> its folder and the steps that are done there."""
    return {}


def begin(name, begun, make_folder):
    """The page's folder, with its files; modules of other pages' folders are forgotten, since some have one name."""
    if name not in begun:
        begun[name] = Page(name).write(make_folder(name.partition(".")[0])), []
        prepare(begun[name][0], name)
    others = tuple(f"{folder}/" for page, (folder, _) in begun.items() if page != name)
    for key in [
        key for key, module in sys.modules.items() if (getattr(module, "__file__", "") or "").startswith(others)
    ]:
        del sys.modules[key]
    return begun[name]


def of_page(page, begins):
    """The page's commands that begin so, its program that calls this, or a script by its name."""
    if begins.endswith("("):
        return [text for kind, text in page.blocks if kind == "python" and begins in text][:1]
    if begins.startswith("python -m") or begins.endswith(".py"):
        return [begins if begins.startswith("python") else f"python {begins}"]
    return [line for line in page.commands if re.search(rf"python -m embodied\.{begins}", line)]


@pytest.mark.filterwarnings("ignore")  # ManiSkill's, SAPIEN's and robosuite's own
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("name", "all_steps"),
    [
        pytest.param(name, all_steps, marks=[pytest.mark.slow] * all_steps)
        for name, steps in PAGES.items()
        for all_steps in (False, True)
        if any(step.slow == all_steps for step in steps)
    ],
)
def test_a_page_is_followed(name, all_steps, begun, tmp_path_factory, monkeypatch, capsys):
    page, (folder, done) = Page(name), begin(name, begun, tmp_path_factory.mktemp)
    split = {"train": folder / "train-of-the-hub.jsonl", "test": folder / "test-of-the-hub.jsonl"}
    monkeypatch.setattr(
        "embodied.core.files.data_files", lambda name: ("0" * 40, (split[name.partition("@")[0].rpartition(":")[2]],))
    )
    monkeypatch.setattr("embodied.check.try_own_objects", lambda *_: None)  # in a process that imports for seconds
    here, absent = runner(folder, monkeypatch, capsys), set()
    for step in [*BEFORE.get(name, ()), *PAGES[name]]:
        if step not in done and (all_steps or not step.slow):
            commands = of_page(page, step.begins)
            assert commands, f"{name} has no {step.begins}"
            absent |= {lacks(command) for command in commands}
            for command in commands:
                if not lacks(command):
                    follow(step, command, folder, here)
            done.append(step)
    if absent - {""}:
        pytest.skip(f"the rest needs {', '.join(sorted(absent - {''}))}")
    if name == "placement.md" and all_steps:
        swapped = [
            {(span.worker, span.name) for span in read_trace(path)}
            for path in folder.glob("runs/pointmass_ppo-2*/trace.json")
        ]
        assert any(
            {("learner-0", "offload"), ("learner-0", "onload"), ("driver", "switch")} <= spans for spans in swapped
        )
    if name == "reasoning.md" and not all_steps:
        table = re.search(r"^\| look at \|.*?\n\n", page.text, re.M | re.S)[0]
        kinds = ("faults/", "engine/", "groups/", "reward/", "critic/", "train/", "return", "success_once")
        runs = [run for recipe in ("sums_grpo", "sums_ppo") for run in folder.glob(f"runs/{recipe}*/metrics.jsonl")]
        assert len(runs) == 3
        for run in runs:
            keys = json.loads(run.read_text().splitlines()[0])
            assert [key for key in keys if key.startswith(kinds) and f"`{key}`" not in table] == []


def follow(step, command, folder, here):
    command = re.sub(*step.swap, command)
    if "\n" in command:
        printed = here.program(command)
    elif command.startswith("python -m"):
        plain = re.search("--(dry-run|help)", command + step.more)
        short = "" if plain else SHORT.get(re.match(r"python -m embodied\.?(\w*)", command)[1], "")
        more = {word.partition("=")[0]: word for word in shlex.split(f"{short} {step.more}")}
        printed = here(command, *more.values(), code=step.code)
    else:
        printed = apart(command, folder)
    for told in step.told if isinstance(step.told, tuple) else (step.told,):
        assert told in printed if isinstance(told, str) else told.search(printed), f"{command}\n{printed}"


MISTAKES = re.findall(r"^\$ (python -m embodied.*)\n(error: .*)$", Page("first_ten_minutes.md").text, re.M)


@pytest.mark.parametrize(("command", "told"), MISTAKES)
def test_a_mistake_is_answered_as_its_page_says(command, told, tmp_path, monkeypatch, capsys):
    (tmp_path / "runs").mkdir()
    assert runner(tmp_path, monkeypatch, capsys)(command, code=2) == told
