"""Shipped recipes planned for machines that are declared: where each role computes, with how much memory, and what
cannot be held is refused. Nothing of it has run on a GPU."""

import json
import re

import pytest

from embodied import evaluate, train
from embodied.config.recipe import load
from embodied.core.errors import ConfigError, EmbodiedError
from embodied.core.types import ActionSpec, EnvSpec
from embodied.envs import env_class
from embodied.learners.memory_estimate import Memory
from embodied.policies import make_policy
from embodied.run import launch, memory_check
from embodied.workflows import roles_of_run
from embodied.workflows.rl_loop import EmbodiedLoop


def planned(recipe, cluster, *more, learn=True):
    config = load([f"recipe={recipe}", f"cluster.machines={cluster}", *more], "train" if learn else "evaluate").config
    try:
        env_class(config.env).check(config.env)
    except EmbodiedError as err:
        pytest.skip(str(err))
    return launch.planned(config, learn, dry=True)


def places(plan):
    """Role -> on how many cores or GPUs of how many nodes it is."""
    found = {}
    for host in plan.hosts:
        for role in host.roles:
            kind = "gpu" if host.device else "cpu"
            found.setdefault(role, []).append((kind, host.node, host.device or host.cores))
    return {
        role: ({kind for kind, *_ in held}, len(held), len({node for _, node, _ in held}))
        for role, held in found.items()
    }


@pytest.mark.parametrize("cluster", ["2xCPU", "1xGPU", "8xGPU"])
def test_the_first_recipe_takes_cores_wherever_it_runs(cluster, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: cluster != "2xCPU")
    config, plan = planned("maniskill_ppo", cluster)
    assert config.env.backend == "cpu_batched"
    assert all(kinds == {"cpu"} for kinds, *_ in places(plan).values()) and not plan.memory


def test_the_first_lines_say_which_networks_learner_shard_does_not_split():
    words = ["recipe=sums_ppo_critic", "run.start_from=null", "learner.shard=true"]
    words += ["cluster.machines=8xGPU", "policy.dtype=float32"]
    apart = {"sim": "cpu:0-3", "policy": "gpu:0-1", "learner": "gpu:2-4", "critic": "gpu:5-7"}
    for place, told in (("collocated", "role critic: all weights on each device"), (json.dumps(apart), "")):
        config = load([*words, f"placement={place}"]).config
        config, plan = launch.planned(config, dry=True, roles=roles_of_run(EmbodiedLoop, config))
        lines = launch.whole_networks(config, plan)
        assert told in " ".join(lines) and bool(told) == bool(lines)
    words = ["recipe=pointmass_grpo", "algo.kl_coef=0.01", "roles.reference=true", "learner.shard=true"]
    config, plan = launch.planned(load([*words, "cluster.machines=2xCPU"]).config, dry=True)
    assert "splits roles of language models only" in " ".join(launch.whole_networks(config, plan))


@pytest.mark.parametrize(("cluster", "gpus", "nodes"), [("1xGPU", 1, 1), ("8xGPU", 8, 1), ("4x8xGPU", 32, 4)])
def test_the_gpu_recipe_takes_gpus(cluster, gpus, nodes):
    config, plan = planned("maniskill_ppo_gpu", cluster)
    assert config.env.backend == "cuda"
    assert places(plan) == {role: ({"gpu"}, gpus, nodes) for role in ("sim", "policy", "learner")}
    assert (config.env.num_envs, config.algo.minibatch_size) == (1024 * gpus, 1600 * gpus)  # as many to a GPU
    assert launch.planned(config, dry=True)[0] == config  # as a run that is resumed reads it
    one_simulates = 'placement={sim: "gpu:0", "policy,learner": "gpu:0"}'
    assert planned("maniskill_ppo_gpu", cluster, one_simulates)[0].env.num_envs == 1024
    with pytest.raises(ConfigError, match=r"env\.backend=cuda needs an NVIDIA GPU"):
        planned("maniskill_ppo_gpu", "2xCPU")


@pytest.mark.parametrize("recipe", ["libero_grpo_smolvla", "libero_ppo_smolvla"])
def test_smolvla_learns_on_one_gpu_of_24_gb_as_its_page_says(recipe):
    _, plan = planned(recipe, "1xL4")
    assert places(plan) == {"sim": ({"cpu"}, 8, 1), "policy": ({"gpu"}, 1, 1), "learner": ({"gpu"}, 1, 1)}
    assert "weights of both 0.8" in plan.memory[0] and plan.memory[0].endswith(" + policy 1.98 = 13.4 of 24 GB")


def test_published_models_act_on_gpus_where_there_are_any(tmp_path):
    for family in ("openvla", "openvla_oft", "pi0", "smolvla"):
        recipe = f"libero_published_{family}"
        for cluster, kind in {"8xGPU": "gpu", "4xCPU": "cpu"}.items():
            _, plan = planned(recipe, cluster, "checkpoint=random", learn=False)
            assert places(plan)["policy"][0] == {kind} and "learner" not in places(plan)
            assert places(plan)["sim"][:2] == ({"cpu"}, 8 if kind == "gpu" else 2)  # eight rows, sixteen cores a GPU


@pytest.mark.slow
def test_a_published_model_of_full_size_is_refused_where_it_cannot_act():
    config = load(["recipe=libero_published_openvla", "checkpoint=random"], "evaluate").config

    def acting(cluster):
        policy, there = (config.policy, {"preset": "full"}), (config.cluster, {"machines": cluster})
        changed = {key: old.model_copy(update=new) for key, (old, new) in {"policy": policy, "cluster": there}.items()}
        return launch.planned(config.model_copy(update=changed), learn=False, dry=True)[1]

    # seven billion weights of two bytes; eight rows of 320 tokens with 32 layers x 2 x 4096 numbers of two bytes;
    # graphs of 1, 2, 4 and 8 rows, 33 MB a row
    assert "policy 16.8" in acting("1xGPU").memory[0]
    assert "policy 15.3" in acting("8xGPU").memory[0]  # a row each
    assert "of 24 GB" in acting("1xL4").memory[0]
    with pytest.raises(
        ConfigError, match=r"2 x simulators 4\.7 \+ 2 x policy .* of 32 GB\nthat is more than the machines have"
    ):
        acting("4xCPU")


@pytest.fixture
def counted_as(monkeypatch):
    """What a policy of full size needs, without counting it, which takes seconds."""
    return lambda **parts: monkeypatch.setattr(
        memory_check, "measured_memory", lambda config, ranks: Memory(1, 1, **parts)
    )


def test_activations_are_computed_again_where_memory_asks_for_it(monkeypatch, counted_as):
    """With learner.checkpoint_activations=auto: of as few blocks as possible."""
    counted_as(weights=1e9, training=1e9, activations=1e9)
    words = "maniskill_ppo_openvla", "1xGPU", "learner.checkpoint_activations=auto"
    assert planned(*words)[0].learner.checkpoint_activations is False
    config = load([f"recipe={words[0]}", words[2]]).config
    activations = {False: 60e9, "half": 30e9, "language": 10e9, True: 5e9}
    for room, which in {70e9: False, 40e9: "half", 20e9: "language", 8e9: True, 1e9: True}.items():

        def needs(config, *_, room=room):
            taken = activations[config.learner.checkpoint_activations]
            return [memory_check.Need("", "gpu:0", room, (memory_check.Load("learner", taken, "", "gpu:0"),))]

        monkeypatch.setattr(memory_check, "needs", needs)
        assert memory_check.with_saved_memory(config, None, None)[0].learner.checkpoint_activations == which


def test_a_run_that_does_not_fit_is_refused_with_options_that_save_memory(counted_as):
    counted_as(weights=30e9, training=60e9, activations=20e9)
    oft, whole = "libero_grpo_openvla_oft", "learner.shard=false"
    with pytest.raises(ConfigError, match=r"of 80 GB\nthat is more than the machines have; try learner\.shard=true$"):
        planned(oft, "8xGPU", whole)
    assert planned(oft, "8xGPU", "learner.shard=true")[1].count("learner") == 8
    assert planned(oft, "8xGPU", "learner.shard=true", "algo.kl_coef=0.1")[1].count("learner") == 8
    with pytest.raises(ConfigError, match=r"of 80 GB\nthat is more than the machines have; try a smaller policy"):
        planned("libero_ppo_pi0", "8xGPU")  # no shards of norms in float32
    with pytest.raises(ConfigError, match=r"gpu:0: .* of 80 GB\n.*try a smaller policy"):
        planned("libero_grpo_openvla_oft", "1xGPU")  # in shards, of which there would be one
    counted_as(weights=10e9, training=20e9, activations=20e9)
    _, plan = planned("libero_grpo_openvla_oft", "8xGPU")
    assert plan.memory[0].startswith("gpu:0 and 7 more alike: 8 x drawing 0.3 + CUDA 0.78 + NCCL 0.63 + learner ")
    assert {host.render for host in plan.hosts if "sim" in host.roles} == {f"gpu:{i}" for i in range(8)}


def test_a_map_that_works_is_on_what_the_networks_and_the_simulator_need(counted_as):
    counted_as(weights=1e9, training=0, activations=0)
    for recipe, bad in {
        "maniskill_ppo_gpu": {"sim,policy": "gpu:0-1", "learner": "gpu:9"},
        "libero_ppo_pi0": {"sim": "cpu:0-7*8", "policy,learner": "gpu:9"},
        "maniskill_ppo": {"sim,policy": "cpu:0-6*7", "learner": "cpu:0"},
    }.items():
        with pytest.raises(ConfigError, match="try placement=") as caught:
            planned(recipe, "2xGPU", f"placement={json.dumps(bad)}")
        works = re.search(r"try placement='(.*)'", str(caught.value))[1]
        assert planned(recipe, "2xGPU", f"placement={works}")[1].hosts


def test_simulators_that_exceed_the_memory_of_a_machine_are_refused(tmp_path):
    (tmp_path / "small.yaml").write_text("nodes: [{gpus: 8, cores: 128, memory_gb: 64}]")
    recipe = ["libero_grpo", f"{tmp_path}/small.yaml", "env.task=libero_10", "env.num_envs=64"]
    _, plan = planned(*recipe, "policy.hidden=[2048,2048]")
    assert plan.count("sim") == 8  # of 3.7 GB each: two thirds of the memory
    (tmp_path / "small.yaml").write_text("nodes: [{cores: 64, memory_gb: 20}]")
    with pytest.raises(ConfigError, match=r"16 sim workers .* 3\.7 GB each, 59\.2 GB in all, and this machine has 20"):
        planned(*recipe)


def test_the_evaluated_policy_decides_on_which_device_it_acts(tmp_path, capsys):
    """And not the recipe's, which an evaluation takes its env from."""
    config = load(["recipe=pointmass_ppo_openvla_tiny"]).config.policy
    spec = EnvSpec(ActionSpec(2), state_dim=4, images={"top": (64, 64, 3)}, instruction=True)
    make_policy(config, spec, 0).save_pretrained(tmp_path)
    for asked, where in {f"[random,{tmp_path}]": "gpu:0", "random": "core"}.items():
        recipe = ["recipe=pointmass_ppo", "env.cameras=[top]", "env.image_size=64", "env.instruction=true"]
        more = ["env.state=proprio", "cluster.machines=1xGPU", "--dry-run"]
        assert evaluate.main([f"checkpoint={asked}", *recipe, *more]) == 0
        (line,) = [line for line in capsys.readouterr().out.splitlines() if "policy on" in line]
        assert where in line


def test_declared_machines_are_shown_and_nothing_is_started(capsys, monkeypatch):
    monkeypatch.setattr("subprocess.run", lambda *_, **__: pytest.fail("a process is started"))
    asked = ["recipe=pointmass_ppo_openvla_tiny", "cluster.machines=2x4xGPU"]
    assert train.main([*asked, "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert "1 x policy + learner on gpu:0 of node1" in told and "ray: one process per host" in told
    assert train.main(asked) == 2
    assert "cluster.machines=2x4xGPU is for planning: add --dry-run" in capsys.readouterr().err
    assert train.main([asked[0], "cluster=8xH1000"]) == 2
    assert "8xH1000 does not describe machines; examples: 8xGPU" in capsys.readouterr().err
    assert evaluate.main(["checkpoint=random", "env.name=pointmass", "cluster.machines=8xGPU", "--dry-run"]) == 0


def test_gpus_that_a_placement_leaves_idle_are_named(capsys):
    for machines, gpus in {"8xGPU": "8 GPUs idle: gpu:0-7\n", "2x4xGPU": "4 GPUs idle: gpu:0-3 of node1\n"}.items():
        assert train.main(["recipe=pointmass_ppo", f"cluster={machines}", "--dry-run"]) == 0
        assert gpus in capsys.readouterr().out
    assert train.main(["recipe=maniskill_ppo_gpu", "cluster=8xGPU", "--dry-run"]) == 0
    assert "idle" not in capsys.readouterr().out
