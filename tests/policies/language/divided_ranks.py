"""One of several ranks that score conversations together: python divided_ranks.py FILE RANK RANKS FOLDER. Prints what
differs from scoring them alone, for every model and degree."""

import math
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))
from tiny_language import answers, build, inputs_of

from embodied.learners.config import LearnerConfig
from embodied.learners.model import Model
from embodied.policies.language import attention
from embodied.runtime import Timers
from embodied.runtime.collective import form_groups
from embodied.runtime.rendezvous import RendezvousFile

where, rank, ranks, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
draw = np.random.default_rng(3)
some = [draw.integers(3, 100, size=size).tolist() for size in (30, 17, 55, 2, 19, 2, 44, 1, 6, 8)]
CONVERSATIONS = [
    *answers(*some[:4], prompt=some[4], group=4),
    *answers(*some[5:8], prompt=some[8], group=2),
    (7, [(False, some[9]), (True, [5, 6]), (False, [9]), (True, [11, 12])]),  # of two turns
    (8, [(False, [9] * 23)]),  # nobody answers
]
MODELS = {
    "learned positions": ({"preset": "tiny_gpt2", "dtype": "float64"}, {}, CONVERSATIONS),
    "two key-value heads": ({"pretrained": folder, "dtype": "float64", "value_head": True}, {}, CONVERSATIONS),
    "sinks": ({"pretrained": f"{folder}/sinks"}, {}, CONVERSATIONS),
    "recomputed": ({"preset": "tiny", "dtype": "float64"}, {"checkpoint_activations": True}, CONVERSATIONS),
    "last layer": ({"preset": "tiny_gpt2", "dtype": "float64", "train_layers": 1}, {}, CONVERSATIONS),
    "one token": ({"preset": "tiny_gpt2", "dtype": "float64"}, {}, [(0, [(False, [5]), (True, [6])])]),
}

if ranks == 8:
    MODELS = {"eight heads": ({"pretrained": f"{folder}/eight", "dtype": "float64"}, {}, CONVERSATIONS)}
IN_HALVES = ("sinks", "recomputed", "last layer")  # exchanges


def results(model, inputs, owns):
    """Log-probs, entropies, values, and the gradient of a sum of them."""
    model.policy.zero_grad()
    scores = model.score(inputs)
    weights = torch.linspace(0.5, 2, len(scores.values), dtype=torch.float64)
    loss = (weights[:, None, None] * (scores.logprobs + 0.1 * scores.entropy)).sum() + (weights * scores.values).sum()
    model.backward(loss if owns else 0 * loss, last=True)
    trained = [p for p in model.policy.parameters() if p.requires_grad]
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
    return scores.logprobs, scores.entropy, scores.values, torch.cat([grad.flatten() for grad in grads])


worker = SimpleNamespace(rank=rank, world_size=ranks, timers=Timers(), waiting=nullcontext)
groups = form_groups(RendezvousFile(where, 60.0), worker, [degree for degree in (2, 4, 8) if degree <= ranks])
for name, (options, learner, conversations) in MODELS.items():
    attention.HALVED["cpu"] = 0 if name in IN_HALVES else math.inf
    model, inputs = Model(build(**options), LearnerConfig(**learner)), inputs_of(*conversations)
    if (head := model.policy.value_head) is not None:
        torch.nn.init.constant_(head.weight, 0.1)
    *scores, gradient = results(model, inputs, owns=True)
    for degree, group in groups.items():
        if name in ("two key-value heads", "sinks") and degree > 2:
            continue
        for owner in (0, degree - 1):
            *found, grads = results(model, inputs | {"ranks": (group, owner)}, owns=group.place == owner)
            apart = max(float((one - other).abs().max()) for one, other in zip(scores, found, strict=True))
            total, largest = sum(group.gather(grads)), float(gradient.abs().max())
            halves = float((grads - total).abs().max()) / largest  # every rank has a part
            print(name, degree, apart, float((total - gradient).abs().max()) / largest, halves, sep=",", flush=True)
for group in groups.values():
    group.gather(torch.zeros(1))  # gloo aborts when its peers are gone first
os._exit(0)
