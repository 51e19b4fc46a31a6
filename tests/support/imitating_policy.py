"""A small policy that speaks characters and learns by imitation; also imported by processes that tests start."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from embodied.core.types import NoiseSpec
from embodied.policies.base import Policy

SEEN = 6  # characters of the conversation that it looks back at


class Characters:
    """Every character is its own token; token 0 ends an answer."""

    stops = frozenset({0, 1})

    def encode(self, said, first):
        text = said if isinstance(said, str) else "".join(f"{m['role'][0]}:{m['content']}|" for m in said)
        return [2] * first + [ord(one) for one in text]

    def decode(self, ids):
        return "".join(map(chr, ids))


class ImitatingPolicy(Policy):
    speaks = True

    def __init__(self, config, spec):
        super().__init__(config, spec)
        self.tokenizer = Characters()
        options = {"max_tokens": 8, "max_length": 64, "dtype": "float64"} | config.kwargs
        self.limits = options
        dtype = getattr(torch, options["dtype"])
        self.embedding = nn.Embedding(128, 8, dtype=dtype)
        self.hidden = nn.Linear(8 * SEEN, 32, dtype=dtype)
        self.head = nn.Linear(32, 128, dtype=dtype)

    def initialise(self, rng):
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.from_numpy(rng.normal(size=p.shape) / np.sqrt(p.shape[-1])))

    def noise_spec(self):
        return NoiseSpec("uniform", 1)

    def act(self, obs, noise, temperature=1.0):
        raise NotImplementedError

    def value(self, obs):
        return np.zeros(1)

    def forward(self, inputs):
        raise NotImplementedError

    def imitate(self, inputs, noise) -> Tensor:
        tokens, lengths = inputs["actions"][:, 0, 0].long(), inputs["lengths"].tolist()
        losses = []
        for stream in tokens.split(lengths):
            seen = torch.cat([stream.new_full((SEEN,), 3), stream[:-1]]).unfold(0, SEEN, 1)
            scores = self.head(torch.tanh(self.hidden(self.embedding(seen).flatten(1))))
            losses.append(nn.functional.cross_entropy(scores, stream, reduction="none"))
        return torch.where(inputs["mask"][:, :, None], torch.cat(losses)[:, None, None], 0.0)
