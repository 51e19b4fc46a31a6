"""Passes that several learner ranks run together, if sequences are divided over ranks (learner.sequence_degree).

A sequence is the content of one pass: conversations that share a prompt, or several short ones. All ranks exchange the
lengths of their sequences, compute the same table of passes from them, and run their passes in its order. Helping ranks
get the sequence's tokens and its pictures' names; its loss stays with its owner, the rank that has the sequence.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied.core.conversations import FIRST_PLACE
from embodied.core.errors import EmbodiedError
from embodied.learners.config import LearnerConfig
from embodied.learners.model import Pass
from embodied.placement.balance import PassCost, SequenceLoad, divide_sequences, exchange_costs, order_of_passes
from embodied.policies.base import Policy
from embodied.runtime.collective import Collective, PendingTensor, RankGroup

SENT = ("actions", "mask", "lengths", "groups")  # arrays of conversations that are sent to helping ranks


@dataclass(frozen=True, kw_only=True)
class SharedPass(Pass):
    """The pass of a sequence that several ranks compute together, with the tokens to send."""

    group: RankGroup
    owner: int  # the owner's place in the group; it computes the loss
    number: int  # number in the table
    order: deque[int]  # numbers of this rank's remaining shared passes
    sizes: tuple[int, int, int]  # tokens, conversations, and numbers that spell the names of its pictures
    arrays: PendingTensor

    def inputs(self, inputs_of: Callable[[Tensor], dict[str, Any]]) -> dict[str, Any]:
        """The sent inputs. Refuses a pass out of order, since ranks would wait for each other in a circle."""
        this_rank, owner = self.group.ranks[self.group.place], self.group.ranks[self.owner]
        if (turn := self.order.popleft()) != self.number:
            raise EmbodiedError(f"learner rank {this_rank} begins pass {self.number} of the table before pass {turn}")
        tokens, conversations, spelt = self.sizes
        number, *arrays, names = self.arrays.wait().cpu().split([1, *2 * [tokens], *2 * [conversations], spelt])
        if int(number) != self.number:
            raise EmbodiedError(
                f"learner rank {owner} runs pass {int(number)} where rank {this_rank} runs pass {self.number}: "
                "their tables differ"
            )
        inputs = dict(zip(SENT, arrays, strict=True))
        inputs |= {"mask": inputs["mask"].bool()[:, None], "ranks": (self.group, self.owner)}
        return inputs | ({"pictures": read_names(names.numpy())} if spelt else {})


class PassTable:
    """Decides, equally on all ranks, which passes several ranks run together."""

    def __init__(
        self, groups: dict[int, RankGroup], config: LearnerConfig, collective: Collective, rank: int, policy: Policy
    ) -> None:
        """`groups`: this rank's groups, by degree."""
        self.groups, self.collective, self.rank = groups, collective, rank
        self.degrees = [1, *groups] if config.sequence_degree == "auto" else [config.sequence_degree]
        self.device, self.cost = policy.device, PassCost(*policy.pass_cost())
        self.exchange = exchange_costs(*policy.exchange_size(), self.device.type, config.pack_tokens)

    def passes(self, items: Sequence[Tensor], inputs: Callable[[Tensor], dict], padding: Tensor | None) -> list[Pass]:
        """This rank's passes for its sequences, each given by its items. All ranks take part. `padding`: items for
        passes that do not count, if all ranks must run equally many."""
        arrays = [arrays_to_send(inputs(sequence)) for sequence in items]
        rows = np.array([self._row(*of_sequence) for of_sequence in arrays]).reshape(-1, 5)
        of_ranks = self.collective.gather(rows)
        first = sum(map(len, of_ranks[: self.rank]))
        owned = dict(enumerate(zip(items, arrays, strict=True), first))
        sequences = [
            SequenceLoad(int(tokens), cost, owner) for owner, rows in enumerate(of_ranks) for tokens, cost, *_ in rows
        ]
        sizes = np.concatenate(of_ranks)[:, 2:].astype(int).tolist()
        ranks = divide_sequences(sequences, len(of_ranks), self.exchange, self.degrees).ranks
        table = order_of_passes(ranks, [sequence.tokens for sequence in sequences], len(of_ranks))
        mine = [number for number in table if self.rank in ranks[number]]
        order = deque(number for number in mine if len(ranks[number]) > 1)
        shared = {
            number: self._share(number, ranks[number], sequences[number].owner, sizes[number], order, owned.get(number))
            for number in order
        }
        passes = [shared[number] if number in shared else Pass(owned[number][0]) for number in mine]
        if padding is None:
            return passes
        most = max(sum(rank in group for group in ranks) for rank in range(len(of_ranks)))
        return passes + [Pass(padding, counts=False)] * (most - len(passes))

    def _row(
        self, tokens: np.ndarray, mask: np.ndarray, lengths: np.ndarray, groups: np.ndarray, names: np.ndarray
    ) -> list[float]:
        """The tokens of a sequence, the cost of these and of its pictures, and its `SharedPass.sizes`."""
        from embodied.policies.language.packing import blocks_of

        blocks = blocks_of(tokens, mask, lengths, groups)
        cost = sum(self.cost.of(lengths[[*block.members]].tolist(), block.shared) for block in blocks)
        cost += self.cost.of([], places=places_of(tokens, read_names(names)))
        return [sum(block.size for block in blocks), cost, len(tokens), len(lengths), len(names)]

    def _share(
        self, number: int, ranks: range, owner: int, sizes: Sequence[int], order: deque[int], own: tuple | None
    ) -> SharedPass:
        """Begin to send a sequence's number, tokens and pictures' names from its owner to all of its ranks."""
        group, place = self.groups[len(ranks)], ranks.index(owner)
        tokens, conversations, spelt = sizes
        sent = torch.empty(1 + 2 * (tokens + conversations) + spelt, dtype=torch.int64)
        if own is not None:
            sent = torch.from_numpy(np.concatenate([[number], *own[1]]).astype(np.int64))
        coming = group.send_from(place, sent.to(self.device))
        return SharedPass(
            items=torch.zeros(0, dtype=torch.int64) if own is None else own[0],
            is_own=own is not None,
            group=group,
            owner=place,
            number=number,
            order=order,
            sizes=(tokens, conversations, spelt),
            arrays=coming,
        )


def arrays_to_send(inputs: dict[str, Any]) -> list[np.ndarray]:
    """A sequence's arrays for helping ranks, flat; the names of its pictures as numbers."""
    text = "\0".join(inputs.get("pictures", ())).encode()
    names = np.frombuffer(text + bytes(-len(text) % 8), np.int64)
    return [*(np.asarray(inputs[name].cpu()).reshape(-1) for name in SENT), names]


def read_names(spelt: np.ndarray) -> list[str]:
    """The names that `arrays_to_send` encoded."""
    return spelt.tobytes().rstrip(b"\0").decode().split("\0") if len(spelt) else []


def places_of(tokens: np.ndarray, names: Sequence[str]) -> int:
    """The places of the different pictures that these tokens show, one name after the other."""
    counts = np.bincount(np.cumsum(tokens == FIRST_PLACE)[tokens < 0], minlength=1)[1:].tolist()
    return sum(dict(zip(names, counts, strict=True)).values())
