"""One of several ranks that compute features of pictures together: python divided_pictures.py FILE RANK RANKS FOLDER.
Prints for every kind of model how features and gradients differ from one rank's, and this rank's share of the work."""

import os
import sys
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import torch
from tiny_language import SEES, build

from embodied.core.pictures import drawing, video
from embodied.policies.language.attention import DividedPass
from embodied.policies.language.config import SEEING
from embodied.runtime import Timers
from embodied.runtime.collective import form_groups
from embodied.runtime.rendezvous import RendezvousFile

where, rank, ranks, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
worker = SimpleNamespace(rank=rank, world_size=ranks, timers=Timers(), waiting=nullcontext)
group = form_groups(RendezvousFile(where, 60.0), worker, [ranks])[ranks]
SHOWN = {
    "one": [drawing("count", 1, 64)],
    "video": [video(f"{folder}/a.mp4", 7)],
    "several": [drawing("colour", 2, 32), video(f"{folder}/a.mp4", 5), drawing("add", 3, 64)],
}


def results(policy, features):
    """The features, and the tower's gradient of a sum of them."""
    policy.zero_grad()
    weights = torch.linspace(0.5, 2, features.numel(), dtype=features.dtype).view_as(features)
    (weights * features).sum().backward()
    grads = [p.grad for p in policy.parameters() if p.grad is not None]
    return features.detach(), torch.cat([grad.flatten() for grad in grads])


def noting(features, looked, model, pictures):
    looked.append(features(model, pictures))
    return looked[-1]


for kind in SEEING:
    policy = build(SEES, pretrained=f"{folder}/{kind}", dtype="float64")
    sight, looked = policy.sight, []
    whole, features = DividedPass(group, 0, "sdpa"), sight.features
    for name, names in SHOWN.items():
        pictures = [sight.read(each) for each in names]
        alone, gradient = results(policy, features(policy.model, pictures))
        sight.features = partial(noting, features, looked)
        together, part = results(policy, sight.divided_features(policy.model, pictures, whole) / ranks)
        sight.features = features
        total = sum(group.gather(part))
        apart = float((ranks * together - alone).abs().max())
        far = float((total - gradient).abs().max() / gradient.abs().max())
        print(kind, name, apart, far, len(looked.pop()) / len(alone), sep=",", flush=True)
group.gather(torch.zeros(1))  # gloo aborts when its peers are gone first
os._exit(0)
