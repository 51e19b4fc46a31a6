"""Learners that imitate: demonstrations of robots, and answers of conversations.

An item of demonstrations is one env step with the chunk of actions from there on; actions after the end do not count.
Ranks own blocks of whole episodes and take the same steps. Images are decoded once into an unnamed file, which
disappears with the process; states and actions are small and stay in memory.

An item of text is one conversation, of which every token of an answer is predicted from all earlier text. Each rank
makes its own block of conversations from the run's seed or reads them from a file, so no text is sent. The loss is the
mean over the answers' tokens of a minibatch, however they are divided into ranks and passes.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied.algorithms.config import SFTConfig
from embodied.algorithms.imitation import KeptImitation
from embodied.core import rng
from embodied.core.arrays import map_obs
from embodied.core.conversations import FIRST_PLACE, pictures_in, with_frames
from embodied.core.errors import ConfigError
from embodied.core.pictures import FRAMES
from embodied.core.types import EnvSpec, Observation, env_blocks
from embodied.datasets import DatasetEpisode, read_dataset
from embodied.learners.examples import Example, beginning_of, check_shares, read_examples, solved_examples
from embodied.learners.learner_worker import MOVING_S, LearnerWorker
from embodied.learners.model import Pass, lr_factor
from embodied.learners.train_batch import RolloutBuffer
from embodied.learners.update import GradientSteps
from embodied.policies.base import Policy
from embodied.runtime import Channel

STEPS = 2**16  # more than the gradient steps of an iteration of RL


class ImitationLearner(LearnerWorker):
    demos: Any = None  # the Demonstrations, or an object with their methods

    def new_policy(self, spec: EnvSpec, start: Path | None) -> Policy:
        policy = super().new_policy(spec, start)
        if not self.algo.learn_deviation:
            for parameter in policy.deviations():
                parameter.requires_grad_(False)
        return policy

    @property
    def options(self) -> SFTConfig | KeptImitation:
        """The options of the data."""
        return self.algo

    def open_data(self) -> int:
        """Read the demonstrations; a policy without trained weights takes their moments into its observation
        normaliser. Returns the number of items of all ranks."""
        policy = self.policy
        options = self.options
        dataset = read_dataset(options.data, images=bool(policy.spec.images), names=options.names)
        count = min(options.episodes or len(dataset), len(dataset))
        lengths = [entry["length"] for entry in dataset.entries[:count]]
        block = env_blocks(count, self.world_size)[self.rank]
        self.demos = Demonstrations(policy.spec, policy.horizon, sum(lengths[: block.start]), sum(lengths))
        num_items = sum(lengths[block.start : block.stop])
        seen = self.demos.read((dataset[number] for number in block), num_items, options.cache)
        moments = [policy.observation_moments(map_obs(lambda array: array[:, None], obs)) for obs in seen]
        if moments[0] is not None and not self.started:
            policy.merge_observation_moments(np.concatenate(self.collective.gather(np.concatenate(moments))))
        return self.demos.total

    def learn(self, trajectories: Channel, batch: int, *others: Any, **more: Any) -> dict[str, float]:
        """Take the gradient steps of an iteration. Its units have the numbers of examples, which every rank gets and of
        which it has some, so the other arguments change nothing."""
        self._restore_gpus()
        buffer = RolloutBuffer()
        numbers = np.concatenate([unit.ids for unit in buffer.units(trajectories, batch, self.timers)])
        return self.imitate(numbers, buffer.end.iteration, buffer.end.total)

    def imitate(self, numbers: np.ndarray, iteration: int, total: int) -> dict[str, float]:
        """Take the steps on these examples, in this order: a pass over all, or an iteration's part of one."""
        demos, config = self.demos, self.algo
        steps = GradientSteps(self.model, self.optimizer, self._losses)
        epoch, places = config.minibatches(demos.total, iteration)
        every = -(-demos.total // config.minibatch_size)
        steps_in_all = total * config.epochs // config.iterations(demos.total) * every
        with self.store.updating(), self.computing.measured():
            for place, minibatch in zip(places, rng.minibatches(numbers, config.minibatch_size), strict=True):
                factor = sft_factor(config, epoch * every + place, every, steps_in_all)
                items = minibatch - demos.first
                items = torch.from_numpy(items[(items >= 0) & (items < len(demos))])
                passes = self._passes(self._micro_batches(items))
                steps.add_passes(passes, partial(self.loss_of, epoch, self._count(minibatch)), 1.0)
                steps.step((factor, factor), 0, len(minibatch), 1.0)
            rows, _ = steps.finished(iteration)
        means = {f"train/{name}": float(np.mean([row[name] for row in rows])) for name in rows[0]}
        return means | {"train/lr": config.lr * factor}

    def _passes(self, micro_batches: Sequence[Tensor]) -> list[Pass]:
        padding, table = torch.zeros(1, dtype=torch.int64), self.model.table
        if table is None:
            return self.model.passes(micro_batches, padding)
        return table.passes(micro_batches, self.demos.batch, padding if self.config.shard else None)

    def loss_of(self, epoch: int, count: float, micro_batch: Pass) -> tuple[Tensor, Tensor]:
        """The sum of the losses of these items, and each loss; `count` divides them. Of a pass that helps with another
        rank's conversations they are 0: the owner's gradient arrives through the exchange."""
        inputs = micro_batch.inputs(self.demos.batch)
        inputs |= {name: inputs[name].to(self.device) for name in ("actions", "mask")}
        losses, beside = self.model.imitate(inputs, self._noise(micro_batch.items.numpy() + self.demos.first, epoch))
        sums = [self._loss_sum(losses, inputs["mask"]), *([] if beside is None else [beside.sum()])]
        means = torch.stack(sums) * float(micro_batch.counts and micro_batch.is_own) / count
        return means.sum(), means.detach()

    @property
    def _losses(self) -> list[str]:
        """The names of the summed losses in the metrics: the actions' loss, and the policy's own."""
        return ["loss", *([self.policy.auxiliary_loss] if self.policy.auxiliary_loss else [])]

    def _noise(self, items: np.ndarray, epoch: int) -> np.ndarray | None:
        """The noise of these items, keyed by item and pass over the data, so it does not depend on the number of
        learners."""
        wanted = self.policy.imitation_noise()
        if wanted is None:
            return None
        draw = rng.normal if wanted.kind == "normal" else rng.uniform
        return draw(self.seed, "imitate", items, np.full(len(items), epoch), wanted.width)

    def close(self) -> None:
        if self.demos is not None:
            self.demos.close()
        super().close()

    # The divisor of a minibatch's loss, and a rank's micro-batches

    def _count(self, minibatch: np.ndarray) -> float:
        """The divisor of the loss of a minibatch, over all ranks."""
        return float(len(minibatch))

    def _loss_sum(self, losses: Tensor, mask: Tensor) -> Tensor:
        """The sum to be divided by this count."""
        return mean_of_items(losses, mask)

    def _micro_batches(self, items: Tensor) -> Sequence[Tensor]:
        """These items of this rank in micro-batches."""
        return items.split(self.config.micro_batch_size or len(items)) if len(items) else ()


def mean_of_items(losses: Tensor, mask: Tensor) -> Tensor:
    """losses [B, C, A], mask [B, C] -> the sum over items of the mean over an item's demonstrated numbers. Losses
    [B] are these means."""
    if losses.ndim == 1:
        return losses.sum()
    shown = mask[:, :, None].expand_as(losses)
    return (torch.where(shown, losses, 0.0).sum((1, 2)) / shown.sum((1, 2))).sum()


class Demonstrations:
    """`first` is the number of this rank's first item among all `total`."""

    def __init__(self, spec: EnvSpec, horizon: int, first: int, total: int) -> None:
        self.spec, self.horizon, self.first, self.total = spec, horizon, first, total
        self.image_cache: DemoImages | None = None
        self._states, self._actions = np.zeros((0, 0), np.float32), np.zeros((0, 0), np.float32)
        self._keyframes = np.zeros(0, np.int64)  # next keyframe of each item
        self._texts: list[str] = []  # instruction of each episode
        self._ends = np.zeros(0, np.int64)  # end of each episode, in items

    def __len__(self) -> int:
        return len(self._actions)

    def read(self, episodes: Iterable[DatasetEpisode], items: int, folder: Path | None) -> Iterator[Observation]:
        """Store these episodes with `items` items in all; yields the observations of each, numbers only."""
        if self.spec.images:
            self.image_cache = DemoImages(dict(self.spec.images), items, folder)
        states, actions, keyframes = [], [], []
        for episode in episodes:
            if self.image_cache:
                self.image_cache.add(episode.obs["images"])
            self._texts.append(episode.obs["instruction"][0])
            states.append(episode.obs["state"] if self.spec.state_dim else np.zeros((len(episode), 0), np.float32))
            keyframes.append(next_keyframes(episode.actions))
            actions.append(episode.actions)
            yield {"state": states[-1]} if self.spec.state_dim else {}
        self._states, self._actions = np.concatenate(states), np.concatenate(actions)
        lengths = np.array([len(of_episode) for of_episode in actions])
        self._ends = np.cumsum(lengths)
        self._keyframes = np.concatenate(keyframes) + np.repeat(self._ends - lengths, lengths)

    def batch(self, items: Tensor) -> dict[str, Any]:
        """The targets of these items for `Policy.imitate`: the actions from each item on, and a mask of existing
        actions."""
        rows = items.numpy()
        episodes = np.searchsorted(self._ends, rows, side="right")
        steps = rows[:, None] + np.arange(self.horizon)
        ends = self._ends[episodes][:, None]
        obs: Observation = {"state": torch.from_numpy(self._states[rows])} if self.spec.state_dim else {}
        if self.image_cache:
            obs["images"] = self.image_cache.take(rows)
        if self.spec.instruction:
            obs["instruction"] = [self._texts[episode] for episode in episodes]
        actions = torch.from_numpy(self._actions[np.minimum(steps, ends - 1)])
        inputs = {"obs": obs, "actions": actions, "mask": torch.from_numpy(steps < ends)}
        if self.spec.state_dim:
            ahead = np.stack([self._keyframes[rows], ends[:, 0] - 1], axis=1)
            inputs["keyframes"] = torch.from_numpy(self._states[ahead])
        return inputs

    def close(self) -> None:
        if self.image_cache:
            self.image_cache.close()


def next_keyframes(actions: np.ndarray) -> np.ndarray:
    """For each step [L] of a demonstration with actions [L, A], returns the index of its next keyframe: the next step
    at which the gripper (the last action) crosses the middle of its range, else the last step.

    Open, open, closed, closed, open: 2, 2, 4, 4, 4.
    """
    gripper = actions[:, -1]
    opened = gripper > (gripper.min() + gripper.max()) / 2
    changes = np.flatnonzero(opened[1:] != opened[:-1]) + 1
    places = np.append(changes, len(actions) - 1)
    return places[np.searchsorted(changes, np.arange(len(actions)), side="right")]


class DemoImages:
    """Images on disk: uint8 [items, H, W, 3] for each camera."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], items: int, folder: Path | None) -> None:
        self.shapes = shapes
        self.item_bytes = sum(int(np.prod(shape)) for shape in shapes.values())
        place = Path(tempfile.gettempdir() if folder is None else folder)
        if not place.is_dir() or not os.access(place, os.W_OK):
            raise ConfigError(
                f"sft.cache={place} is not a folder that can be written to; mkdir {place}, or name another"
            )
        needed, free = items * self.item_bytes, shutil.disk_usage(place).free
        if needed > free:
            raise ConfigError(
                f"the images of {items:,} env steps take {needed / 1e9:.3g} GB decoded, and {place} has "
                f"{free / 1e9:.3g} GB left; name another folder as sft.cache, or take fewer with sft.episodes"
            )
        self._file, name = tempfile.mkstemp(prefix="embodied-images-", dir=place)
        os.unlink(name)

    def add(self, images: dict[str, np.ndarray]) -> None:
        """Append the images of the next items."""
        rows = [images[camera].reshape(len(images[camera]), -1) for camera in self.shapes]
        rest = memoryview(np.concatenate(rows, axis=1)).cast("B")
        while len(rest):
            rest = rest[os.write(self._file, rest) :]

    def take(self, items: np.ndarray) -> dict[str, Tensor]:
        rows = np.empty((len(items), self.item_bytes), np.uint8)
        for row, item in zip(rows, items.tolist(), strict=True):
            if os.preadv(self._file, [row], item * self.item_bytes) != self.item_bytes:
                raise OSError(f"the images of item {item} are not there any more")
        images, at = {}, 0
        for camera, shape in self.shapes.items():
            size = int(np.prod(shape))
            images[camera] = torch.from_numpy(rows[:, at : at + size].reshape(len(items), *shape))
            at += size
        return images

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def sft_factor(config: SFTConfig, step: int, steps: int, total: int) -> float:
    """The factor on learning rates at gradient step `step` of `total`, with `steps` per pass over the data.

    Cosine with lr 1, final_lr 0.1, 1 step to warm up and 5 in all: 0.5, 1, 0.1 + 0.45 * (1 + cos(pi / 4)) = 0.868,
    0.55, 0.232.
    """
    warm = config.warmup_steps
    if step < warm:
        return lr_factor(config.lr_schedule, step // steps * steps / total) * (step + 1) / (warm + 1)
    if config.lr_schedule != "cosine":
        return lr_factor(config.lr_schedule, step // steps * steps / total)
    last = config.final_lr / config.lr if config.lr else 0.0
    return lr_factor("cosine", (step - warm) / (total - warm), last)


class TextImitationLearner(ImitationLearner):
    def __init__(self, env: Any, *learner: Any) -> None:
        """`env`: the options of the text env with the prompts."""
        super().__init__(*learner)
        self.env = env

    def open_data(self) -> int:
        """Encode this rank's conversations as tokens. Returns the number of conversations of all ranks."""
        config = self.options
        given = read_examples(config.data, config.episodes, config.names) if config.data else None
        total = config.episodes if given is None else len(given)
        check_shares(total, "examples", self.world_size)
        block = env_blocks(total, self.world_size)[self.rank]
        if given is None:
            examples = solved_examples(self.env, self.seed, block, self.tick)
        else:
            rule = getattr(self.env, "frames", FRAMES), getattr(self.env, "frame_s", None)
            turns = given[block.start : block.stop]
            examples = [tuple((with_frames(said, *rule), answer) for said, answer in talk) for talk in turns]
        self.demos = ExampleTokens(self.policy, examples, block.start, total)
        self.sizes = np.concatenate(self.collective.gather(self.demos.sizes))  # sizes of all ranks' conversations
        return total

    def _count(self, minibatch: np.ndarray) -> float:
        return float(self.sizes[minibatch, 1].sum())

    def _loss_sum(self, losses: Tensor, mask: Tensor) -> Tensor:
        return torch.where(mask[:, :, None], losses, 0.0).sum()

    def _micro_batches(self, items: Tensor) -> Sequence[Tensor]:
        packs = into_packs(self.demos.sizes[items.numpy(), 0].tolist(), self.model.pack_tokens)
        return [items[pack] for pack in packs]


class ImitatingLearner(ImitationLearner):
    """A learner of RL whose gradient steps also imitate (algo.imitation). Its minibatch of items follows from the run's
    seed, the iteration and the number of the step, so a resumed run takes the same ones."""

    algo: Any  # of RL
    learn = LearnerWorker.learn

    @property
    def options(self) -> KeptImitation:
        return self.algo.imitation

    def new_policy(self, spec: EnvSpec, start: Path | None) -> Policy:
        policy = LearnerWorker.new_policy(self, spec, start)
        if self.config.shard and policy.deviations():
            raise ConfigError(
                "algo.imitation leaves the deviation of actions to RL, which learner.shard=true cannot; try "
                "learner.shard=false"
            )
        return policy

    def open_data(self) -> int:
        with self.alive(MOVING_S):
            total = super().open_data()
        self.model.imitation = self.imitate_too
        return total

    def imitate_too(self, steps: GradientSteps, iteration: int, divisor: float, count: float) -> None:
        """Add the gradient of the next minibatch of demonstrations, times `count`, and its loss, times `divisor`."""
        options, number, total = self.options, len(steps.steps), self.demos.total
        order = rng.generator(self.seed, "imitation", iteration).permutation(total)
        size = min(options.minibatch_size, total)
        minibatch = np.take(order, np.arange(number * size, (number + 1) * size), mode="wrap")
        items = minibatch - self.demos.first
        items = torch.from_numpy(items[(items >= 0) & (items < len(self.demos))])
        weight, items_count = options.weight_at(iteration), self._count(minibatch)

        def loss_of(micro_batch: Pass) -> tuple[Tensor, Tensor]:
            loss, parts = self.loss_of(iteration * STEPS + number, items_count, micro_batch)
            numbers = torch.zeros_like(steps.sums)
            numbers[-1] = parts[0] * divisor
            return loss * (weight * count), numbers

        deviations = [p for p in self.policy.deviations() if p.requires_grad]
        for parameter in deviations:
            parameter.requires_grad_(False)
        steps.add_passes(self._passes(self._micro_batches(items)), loss_of, 1.0)
        for parameter in deviations:
            parameter.requires_grad_(True)


class ImitatingTextLearner(ImitatingLearner, TextImitationLearner):
    """The same for conversations."""


def into_packs(lengths: list[int], most: int) -> list[slice]:
    """Packs of consecutive conversations with at most `limit` tokens; a longer conversation is a pack by itself.
    Lengths 3 2 4 9 1 with at most 6: 3 2, 4, 9, 1."""
    cuts, held = [0], 0
    for number, length in enumerate(lengths):
        if number > cuts[-1] and held + length > most:
            cuts.append(number)
            held = 0
        held += length
    return [slice(a, b) for a, b in pairwise([*cuts, len(lengths)]) if b > a]


class ExampleTokens:
    """The conversations of one rank as tokens; `first` is the number of its first conversation among all `total`."""

    def __init__(self, policy: Any, examples: Sequence[Example], first: int, total: int) -> None:
        self.first, self.total = first, total
        tokens, masks = [], []
        self.pictures: list[list[str]] = []  # of each conversation, in the order of its tokens
        self.streams: list[list[int]] = []  # of each conversation: the tokens of each prompt with its answers
        for number, example in enumerate(examples, first):
            streams = written(policy.tokenizer, example)
            for stream, mask in streams:
                check_length(policy, stream, mask, f"example {number + 1} ({beginning_of(example[0][0])})")
            self.streams.append([len(stream) for stream, _ in streams])
            shown = [name for said, _ in example for name in pictures_in(said)]
            counts = [int((stream == FIRST_PLACE).sum()) for stream, _ in streams]  # each shows all up to its end
            self.pictures.append([name for count in counts for name in shown[:count]])
            stream, mask = map(np.concatenate, zip(*streams, strict=True))
            tokens.append(stream)
            masks.append(mask)
        lengths = np.array([len(stream) for stream in tokens], np.int64)
        # [R, 2]: the number of tokens of each conversation, and of its trained tokens.
        self.sizes = np.stack([lengths, [int(mask.sum()) for mask in masks]], axis=1)
        self.ends = np.cumsum(lengths)
        self.tokens, self.mask = np.concatenate(tokens), np.concatenate(masks)

    def __len__(self) -> int:
        return len(self.sizes)

    def batch(self, items: Tensor) -> dict[str, Tensor]:
        """The inputs of `Policy.imitate`: the conversations one after the other, n tokens in all."""
        rows = items.numpy()
        lengths, ends = self.sizes[rows, 0], self.ends[rows]
        at = np.concatenate([np.arange(end - length, end) for end, length in zip(ends, lengths, strict=True)])
        return {
            "actions": torch.from_numpy(self.tokens[at])[:, None, None],
            "mask": torch.from_numpy(self.mask[at])[:, None],
            "lengths": torch.tensor([length for row in rows for length in self.streams[row]]),
            "groups": torch.tensor([number for number, row in enumerate(rows) for _ in self.streams[row]]),
            "pictures": [name for row in rows for name in self.pictures[row]],
        }

    def close(self) -> None:
        """Nothing is open."""


def written(tokenizer: Any, example: Example) -> list[tuple[np.ndarray, np.ndarray]]:
    """A conversation's tokens, int64 [n], and a mask of the trained tokens: the answers, each with its end token. Where
    the chat template changes earlier turns, further ones with the later answers.

    "5+6=" answered by "11" as characters with the stop token 0: 5 + 6 = 1 1 0, mask F F F F T T T.
    """
    streams: list[tuple[list[int], list[bool]]] = [([], [])]
    history: list[tuple[Any, list[int]]] = []
    end_token = getattr(getattr(tokenizer, "base", None), "eos_token_id", None)
    stop = end_token if end_token in tokenizer.stops else min(tokenizer.stops)
    for turn, (said, answer) in enumerate(example):
        tokens, mask = streams[-1]
        whole = tokenizer.conversation(history, said) if getattr(tokenizer, "rewrites", False) else None
        if whole is not None and whole[: len(tokens)] != tokens:
            tokens, mask = [], []
            streams.append((tokens, mask))
        prompt = tokenizer.encode(said, first=not turn) if whole is None else whole[len(tokens) :]
        reply = [*tokenizer.encode(answer, first=False), stop]
        tokens += [*prompt, *reply]
        mask += [False] * len(prompt) + [True] * len(reply)
        history.append((said, reply))
    return [(np.array(tokens, np.int64), np.array(mask)) for tokens, mask in streams]


def check_length(policy: Any, tokens: np.ndarray, mask: np.ndarray, which: str) -> None:
    """Refuse an example that is too long for the policy, in an answer or as a whole."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    longest = int((edges[1::2] - edges[::2]).max())
    if (limit := policy.config.max_tokens) and longest > limit:
        raise ConfigError(
            f"{which}: an answer of {longest} tokens, with the one that ends it, is more than "
            f"policy.max_tokens={limit}; try policy.max_tokens={longest}, or leave the example out"
        )
    if (room := policy.max_length) and len(tokens) > room:
        raise ConfigError(f"{which}: a conversation of {len(tokens)} tokens does not fit into the model's {room}")
