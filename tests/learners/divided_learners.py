"""One of several learner ranks that learn the same batch in several ways, passes divided among them: python
divided_learners.py FOLDER RANK RANKS. Prints how far each ends from a single rank that learns all of it alone."""

import json
import os
import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from announced import imitate
from tiny_language import SEES, SPEC, build

from embodied.algorithms.config import GRPOConfig, PPOConfig, SFTConfig
from embodied.core.conversations import FIRST_PLACE
from embodied.core.pictures import drawing
from embodied.core.types import BatchEnd, Trajectory, Unit, choose
from embodied.learners import learner_worker
from embodied.learners.config import LearnerConfig
from embodied.learners.divided_passes import PassTable, SharedPass
from embodied.learners.imitation import TextImitationLearner
from embodied.learners.learner_worker import LearnerWorker
from embodied.policies.language.config import LanguageConfig
from embodied.profiling.role_probe import Items
from embodied.runtime import Timers
from embodied.runtime.rendezvous import RendezvousFile

folder, rank, ranks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
SIZE = 2  # conversations of a group
ANSWERS = [(350, 20), (9, 30), (200, 180), (25, 12)]  # tokens, by group
PACK = 128
BASE = {"groups": len(ANSWERS), "group_size": SIZE, "epochs": 1, "minibatch_size": SIZE * 2, "lr": 1e-3}
BASE |= {"adam_eps": 0.1, "max_grad_norm": None}
GRPO = {"name": "grpo", **BASE}
EXPERTS = {"preset": "tiny_moe", "dtype": "float32"}  # which grouped products need
WAYS = {
    "fixed": (GRPO | {"kl_coef": 0.1}, {"sequence_degree": ranks}, {}),
    "auto": (GRPO | {"decoupled": True, "logprob_level": "episode"}, {"sequence_degree": "auto"}, {}),
    "sharded": (GRPO | {"kl_coef": 0.1}, {"sequence_degree": "auto", "shard": True}, {}),
    "periodic": (GRPO | {"minibatch_size": None}, {"sequence_degree": "auto"}, {}),
    "values": ({"name": "ppo", **BASE}, {"sequence_degree": 2}, {"value_head": True}),
    "imitation": ({"name": "sft"}, {"sequence_degree": "auto"}, {}),
    "pictures": (GRPO, {"sequence_degree": ranks}, {"preset": "tiny_vl"}),
    "pictures sharded": (GRPO, {"sequence_degree": "auto", "shard": True}, {"preset": "tiny_vl"}),
    "pictures apart": (GRPO, {"shard": True}, {"preset": "tiny_vl"}),
    "experts": (GRPO, {"shard": True}, EXPERTS),
    "experts divided": (GRPO | {"kl_coef": 0.1}, {"sequence_degree": "auto", "shard": True}, EXPERTS),
}
FEW = WAYS.keys() - {"sharded", "pictures", "pictures apart", "experts"}  # what two ranks learn in
SHOWN = {0: [64, 32], 1: [128], 2: [32, 32, 32]}  # pixels of the pictures in the prompts of these groups
USED: list[set[int]] = [set()]  # degrees of this rank's passes, table by table


def policy_of(preset: str):
    return build(SPECS[preset], preset=preset, dtype="float32" if preset == EXPERTS["preset"] else "float64")


def conversations(preset: str) -> Trajectory:
    """Groups of conversations, each a prompt of five tokens and an answer, and for a policy that sees pictures in some
    prompts; their log-probs are nearly the policy's."""
    draw, count = np.random.default_rng(0), len(ANSWERS) * SIZE
    policy = policy_of(preset)
    prompts = [*draw.integers(3, 90, (len(ANSWERS), 5))]
    names = {
        group: [drawing("count", 10 * group + at, size) for at, size in enumerate(sizes)]
        for group, sizes in (SHOWN.items() if policy.spec.pictures else ())
    }
    for group, shown in names.items():
        prompts[group] = np.concatenate([[3], *(policy.sight.read(name).tokens for name in shown), prompts[group]])
    prompts = [prompt for prompt in prompts for _ in range(SIZE)]
    answers = [draw.integers(3, 90, size) for size in np.ravel(ANSWERS)]
    tokens = [np.concatenate(both).astype(np.int32) for both in zip(prompts, answers, strict=True)]
    lengths = np.array([len(each) for each in tokens])
    mask = np.concatenate([np.arange(len(all_)) >= len(p) for all_, p in zip(tokens, prompts, strict=True)])
    inputs = {"actions": np.concatenate(tokens)[:, None, None], "mask": mask[:, None], "lengths": lengths}
    obs = {}
    if names:
        obs["picture"] = np.full(lengths.sum(), "", object)
        inputs["pictures"] = [name for group in range(len(ANSWERS)) for name in SIZE * names.get(group, [])]
        obs["picture"][inputs["actions"][:, 0, 0] == FIRST_PLACE] = inputs["pictures"]
    with torch.no_grad():
        found = policy(inputs | {"groups": np.arange(count)}).logprobs.numpy()
    last = (np.arange(lengths.sum()) == np.repeat(np.cumsum(lengths), lengths) - 1)[:, None]
    return Trajectory(
        ids=np.arange(count),
        lengths=lengths,
        obs=obs,
        actions=inputs["actions"],
        logprobs=found + 0.1 * mask[:, None, None] * draw.normal(size=found.shape),
        rewards=np.zeros((len(mask), 1)),
        terminated=last,
        truncated=np.zeros_like(last),
        mask=mask[:, None],
        versions=np.where(mask, 0, -1),
        episodes=np.repeat(np.arange(count), lengths),
    )


SPECS = {"tiny_gpt2": SPEC, "tiny_moe": SPEC, "tiny_vl": SEES}
DATA = {preset: conversations(preset) for preset in SPECS}
IDS = DATA["tiny_gpt2"].ids
SCORES, ADVANTAGES = (np.random.default_rng(seed).normal(size=len(IDS)) for seed in (7, 8))


def unit(preset: str, ids: np.ndarray, **about) -> list:
    """What a channel delivers for these conversations."""
    source = f"sim#{ids[0]}-{len(ids)}"
    return [choose(DATA[preset], ids, source), Unit((source,), ids, ADVANTAGES[ids], SCORES[ids], **about)]


def learned(name: str, rank: int, ranks: int) -> tuple[dict, dict]:
    """The weights and numbers of a rank after an update."""
    algo, options, policy = WAYS[name]
    policy = {"preset": "tiny_gpt2", "dtype": "float64"} | policy
    if ranks == 1:
        options = {"sequence_degree": 1}
    meet = None if ranks == 1 else RendezvousFile(f"{folder}/{name}", 500.0)
    config = LanguageConfig(name="language", **policy)
    if name == "imitation":
        return imitated(config, LearnerConfig(pack_tokens=PACK, **options), rank, ranks, meet)
    kind = PPOConfig if algo["name"] == "ppo" else GRPOConfig
    worker = LearnerWorker(config, kind(**algo), LearnerConfig(pack_tokens=PACK, **options), 0, meet)
    worker.name, worker.rank, worker.world_size, worker.timers = f"learner-{rank}", rank, ranks, Timers()
    worker.build(SPECS[policy["preset"]], f"{rank:016d}", snapshot=False)
    if name == "periodic":
        shares = [np.array_split(np.arange(first, first + SIZE), ranks)[rank] for first in IDS[::SIZE]]
        one = partial(unit, policy["preset"])
        units = [one(ids) if len(ids) else one(IDS[:1], is_padding=True) for ids in shares]
    else:
        units = [unit(policy["preset"], np.array_split(IDS.reshape(-1, SIZE), ranks)[rank].ravel())]
    channel = Items([*(item for each in units for item in each), BatchEnd(0, 10)])
    numbers = worker.learn(channel, 0, 0, begins_early=name == "periodic")
    weights = dict(worker._whole_tensors(worker.dtypes.keys()))
    worker.close()
    return weights, numbers


def imitated(config: LanguageConfig, options: LearnerConfig, rank: int, ranks: int, meet: RendezvousFile | None):
    """The same after a pass over some examples."""
    data, sizes = Path(folder, f"examples-{rank}-of-{ranks}.jsonl"), np.ravel(ANSWERS)
    rows = [{"prompt": "2+2=", "answer": str(number) * (size // 2)} for number, size in enumerate(sizes, 2)]
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    sft = SFTConfig(data=data, minibatch_size=4, lr=1e-3, adam_eps=0.1, epochs=1)
    worker = TextImitationLearner(None, config, sft, options, 0, meet)
    worker.name, worker.rank, worker.world_size, worker.timers = f"learner-{rank}", rank, ranks, Timers()
    worker.build(SPEC, f"{rank:016d}", snapshot=False)
    worker.open_data()
    numbers = imitate(worker, 0, 1)
    weights = dict(worker._whole_tensors(worker.dtypes.keys()))
    worker.close()
    return weights, numbers


def watched(table: PassTable, *inputs) -> list:
    passes = plain(table, *inputs)
    USED.append({each.group.size if isinstance(each, SharedPass) else 1 for each in passes})
    return passes


learner_worker.SIDES["cpu"] = 32  # else each learner measures its core's peak rate for longer
plain, PassTable.passes = PassTable.passes, watched
for name in [name for name in WAYS if ranks > 2 or name in FEW]:
    wanted_file = Path(folder, f"alone {name}.safetensors")  # meetings remove what begins with their name
    if rank == 0:
        wanted, alone = learned(name, 0, 1)
        save_file(
            {key: tensor.clone() for key, tensor in wanted.items()},
            wanted_file,
            {"numbers": json.dumps({key: float(number) for key, number in alone.items()})},
        )
    del USED[1:]
    weights, numbers = learned(name, rank, ranks)
    if rank > 0:  # the first rank has written it before it joined the others
        with safe_open(wanted_file, "pt") as file:
            wanted = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            alone = json.loads(file.metadata()["numbers"])
    preset = WAYS[name][2].get("preset", "tiny_gpt2")
    first = policy_of(preset).state_dict()
    moved = max(float((wanted[key] - first[key]).abs().max()) for key in first)
    apart = max((float((weights[key] - wanted[key]).abs().max()) for key in weights), default=0.0)
    same = max(
        abs(numbers[key] - alone[key]) / (1e-6 + abs(alone[key]))
        for key in alone
        if "time" not in key and not key.startswith("text/")
    )
    print(name, max(apart, same), moved, "".join(map(str, sorted(max(USED, key=len)))), sep=",", flush=True)
sys.stdout.flush()
os._exit(0)
