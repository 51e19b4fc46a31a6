"""The workers of the roles that a recipe adds between players and learners.

The reference and a critic are networks that add a column to the trajectories. The reference's log-probs equal the
learners' own reference. A critic predicts a conversation's remaining return, sends these values on, and updates on the
same conversations before the learners: PPO's advantages need the values from before its update. With learner.shard,
workers in processes of their own hold shards of their network and score the groups of a round together.

Scoring workers give conversations a reward instead of their env, or in addition to it: by a function, by a classifier
network, or by a language model (the judge), which gets its questions over a queue, like a policy. A score is the reward
of a conversation's last token. The other tokens' rewards are the env's if scores add to them, else 0.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied.algorithms.advantages import token_gae
from embodied.algorithms.config import AlgoConfig, PPOConfig
from embodied.algorithms.group_pool import score_of
from embodied.algorithms.losses import value_loss_sum
from embodied.config.sections import RolesSection
from embodied.core import rng
from embodied.core.conversations import Prompt, PromptBatch
from embodied.core.errors import CheckpointError, ConfigError, Diverged
from embodied.core.files import as_path
from embodied.core.request_queue import RequestClient, Waiting
from embodied.core.types import RESTART, Answerers, EnvSpec, EpisodeResult, Trajectory, choose, join
from embodied.envs import import_class
from embodied.envs.own_modules import explain_errors
from embodied.learners.config import LearnerConfig
from embodied.learners.model import (
    Model,
    Pass,
    PolicyOptimizer,
    is_sharded,
    local,
    local_weights,
    rows_of,
    scheduled,
    whole_of,
)
from embodied.learners.train_batch import (
    REFERENCE,
    RankBatch,
    conversation_rewards,
    divergences,
    items_of,
    logprobs_of,
    scores_of,
    trained_items,
)
from embodied.learners.update import GradientSteps
from embodied.policies import make_policy
from embodied.policies.language.config import LanguageConfig
from embodied.policies.language.language_worker import LanguageWorker
from embodied.policies.language.policy import LanguagePolicy
from embodied.policies.language.tokenizer import tokenizer_of
from embodied.policies.policy_folder import read_weights
from embodied.runtime import Needs
from embodied.runtime.device_memory import Computing, DeviceTensors, give_back_unused, num_bytes
from embodied.runtime.rendezvous import RendezvousAddress, listen
from embodied.workflows.relay import RelayWorker


class NetworkWorker(RelayWorker):
    """A network on a device, offloaded when other workers need the memory."""

    learns = False

    def __init__(
        self, policy: Any, algo: AlgoConfig, learner: LearnerConfig, seed: int, device: str, rendezvous: Any = None
    ) -> None:
        """`rendezvous` of the role's workers, if they hold shards of the network; None: each holds the whole."""
        self.config, self.algo, self.seed, self.device, self.rendezvous = policy, algo, seed, device, rendezvous
        shards = {} if rendezvous else {"shard": False, "reduce_each_pass": False}
        self.learner = learner.model_copy(update={"sequence_degree": 1} | shards)
        self.computing = Computing()

    def listen(self, timeout_s: float) -> RendezvousAddress:
        """Rank 0: open the rendezvous for workers on several machines."""
        self.server, self.rendezvous = listen(timeout_s)
        return self.rendezvous

    def set_rendezvous(self, address: RendezvousAddress) -> None:
        self.rendezvous = address

    def build(self, spec: EnvSpec, start: Path | None = None) -> None:
        """Build the network with the run's initial weights."""
        self.belongings = DeviceTensors(self.timers)
        policy = self.make(spec).eval()
        if start:
            policy.begin_with(read_weights(start))
        if not self.learns:
            policy.requires_grad_(False)
        self.model = Model(policy.to(self.device), self.learner, self.tick)
        self.model.collective = OfRole(self)
        self.dtypes = {name: tensor.dtype for name, tensor in policy.state_dict().items()}
        if self.learner.shard:
            from embodied.learners.sharding import form_shards, shard

            form_shards(self.rendezvous, self.rank, self.world_size, self.model.device)
            shard(policy)

    def make(self, spec: EnvSpec) -> Any:
        return make_policy(self.config, spec, self.seed)

    def tensors(self) -> list[Tensor]:
        """All tensors on the device."""
        return local_weights(self.model.policy)

    def needs(self, shared: bool = False) -> Needs:
        return Needs(num_bytes(self.tensors()) + self.computing.num_bytes)

    def onload(self) -> None:
        self.belongings.onload()

    def offload(self) -> None:
        if not self.belongings.away:
            self.belongings.offload({"network": self.tensors()})
            give_back_unused()

    def add(self, parts: list[Trajectory]) -> list[Trajectory]:
        if not parts:
            with torch.no_grad():
                self.help()
            return []
        with self.computing.measured():
            trajectories = self.with_column(join(parts))
        return [choose(trajectories, unit.ids) for unit in parts]

    def with_column(self, played: Trajectory) -> Trajectory:
        """The trajectories with the role's column added."""
        raise NotImplementedError

    def help(self) -> None:
        """Run as many passes as the other workers, if they hold shards."""
        for _ in range(self.model.most_passes(0)):
            self.made_up_values()

    def made_up_values(self) -> Tensor:
        """A pass with a made-up conversation."""
        tokens, mask = np.zeros((2, 1, 1), np.int32), np.array([[False], [True]])
        conversation = {"actions": tokens, "mask": mask, "lengths": np.array([2]), "groups": np.array([0])}
        return self.model.score(conversation | {"is_padding": True}).values

    def close(self) -> None:
        if self.learner.shard:
            from embodied.learners.sharding import leave

            leave()

    def items(self, played: Trajectory) -> tuple[RankBatch, np.ndarray]:
        """The trajectory's decisions as items, and a mask of counted ones, bool [K]."""
        trained = trained_items(played, self.algo, self.model.policy.speaks)
        return items_of(played, self.algo, self.model, trained), trained


class ReferenceWorker(NetworkWorker):
    """Adds the log-probs of the run's initial policy."""

    def with_column(self, played: Trajectory) -> Trajectory:
        batch, _ = self.items(played)
        logprobs = logprobs_of(self.model, batch, self.algo).cpu().numpy()
        return replace(played, replay=played.replay | {REFERENCE: logprobs})


class CriticPolicy(LanguagePolicy):
    """Predicts values and generates nothing: its log-probs and entropies are zeros."""

    def words(self, hidden: Tensor, takes: np.ndarray, chosen: np.ndarray) -> tuple[Tensor, Tensor]:
        nothing = hidden.new_zeros(len(takes), dtype=self.exact)
        return nothing, nothing


class CriticWorker(NetworkWorker):
    """Adds values of conversations, token by token, and learns from all their returns at the end of the batch."""

    algo: PPOConfig
    learns = True

    def __init__(
        self,
        policy: Any,
        algo: PPOConfig,
        learner: LearnerConfig,
        seed: int,
        device: str,
        rendezvous: Any,
        lr: float | None,
        iterations: int,
    ) -> None:
        rate = next(given for given in (lr, algo.value_lr, algo.lr) if given is not None)
        self.lr_factor = partial(scheduled, algo, total=iterations)  # as the policy's learning rate falls
        algo = algo.model_copy(update={"lr": rate, "value_lr": rate})
        super().__init__(policy.model_copy(update={"value_head": True}), algo, learner, seed, device, rendezvous)
        self.updates = 0

    def make(self, spec: EnvSpec) -> Any:
        policy = CriticPolicy(self.config, spec)
        policy.initialise(rng.generator(self.seed, "critic", "initial weights"))
        return policy

    def build(self, spec: EnvSpec, start: Path | None = None) -> None:
        super().build(spec, start)
        self.optimizer = PolicyOptimizer(self.model.policy, self.algo, OfRole(self), self.dtypes)
        self.valued: list[Trajectory] = []  # conversations of the batch, with their values

    def tensors(self) -> list[Tensor]:
        return [*super().tensors(), *self.optimizer.tensors()]

    def with_column(self, played: Trajectory) -> Trajectory:
        batch, _ = self.items(played)
        values = scores_of(self.model, batch, 1, lambda scores: scores.values).double().cpu().numpy()
        self.valued.append(replace(played, values=values))
        return self.valued[-1]

    def finish(self) -> dict[str, float]:
        valued, self.valued = self.valued, []
        with self.computing.measured():
            if not valued:
                return self.learn(None, *[np.zeros(0)] * 3)
            played = join(valued)
            batch, trained = self.items(played)
            return self.learn(batch, played.values, self.returns(played, batch, trained), trained)

    def returns(self, played: Trajectory, batch: RankBatch, trained: np.ndarray) -> np.ndarray:
        """The tokens' returns; with algo.kl_in=reward divergences from the reference lower the rewards."""
        algo = self.algo
        rewards = conversation_rewards(played, scores_of_episodes(played, algo, self.config.max_tokens), trained)
        if algo.kl_coef and algo.kl_in == "reward":
            reference = torch.as_tensor(np.array(played.replay[REFERENCE]), device=self.device)
            rewards[:, 0] -= algo.kl_coef * divergences(batch, reference)
        return token_gae(rewards[:, 0], played.values, trained, played.lengths, algo.gamma, algo.gae_lambda)[1]

    def learn(
        self, batch: RankBatch | None, values: np.ndarray, returns: np.ndarray, trained: np.ndarray
    ) -> dict[str, float]:
        """Gradient steps towards the returns, together with the other critic ranks; a minibatch consists of
        conversations."""
        algo, count = self.algo, 0 if batch is None else len(batch.numbers)
        total, tokens = self.summed(np.array([count, trained.sum()], np.float64)).tolist()
        size = algo.minibatch_size or max(total, 1)
        steps = max(1, round(total / size))
        steps_taken, lr_factor = GradientSteps(self.model, self.optimizer, ["value_loss"]), self.lr_factor(self.updates)
        self.updates += 1
        if batch is not None:
            batch = batch.with_targets({"values": values, "returns": returns, "weights": trained}, self.model)
        for epoch in range(algo.epochs):
            order = rng.permutation(self.seed, self.updates, epoch, count)
            for samples in np.array_split(order, steps):
                if batch is not None:
                    passes = batch.passes(self.model, torch.from_numpy(np.sort(samples)))
                    steps_taken.add_passes(passes, partial(self.value_loss, batch), tokens / steps)
                else:
                    self.help_learning()
                steps_taken.step((lr_factor, lr_factor), epoch, len(samples), tokens / steps)
        losses = [row["value_loss"] for row in steps_taken.read(steps_taken.steps)[0]]
        if not np.isfinite(losses).all():
            raise Diverged("the critic's loss is not finite; try a lower roles.critic_lr")
        errors, moments = np.square(returns - values)[trained > 0], returns[trained > 0]
        sums = self.summed(np.array([errors.sum(), moments.sum(), np.square(moments).sum()]))
        spread = sums[2] - sums[1] ** 2 / max(tokens, 1)
        explained = 1 - sums[0] / spread if spread > 0 else 0.0
        rate = self.algo.lr * lr_factor
        return {
            "critic/value_loss": float(np.mean(losses)),
            "critic/explained_variance": float(explained),
            "critic/lr": rate,
        }

    def value_loss(self, batch: RankBatch, micro_batch: Pass) -> tuple[Tensor, Tensor]:
        scores, items = self.model.score(micro_batch.inputs(batch.inputs)), batch.select_loss_arrays(micro_batch.items)
        bounds = {"value_clip": self.algo.value_clip, "huber_delta": self.algo.huber_delta}
        weights = items.weights * float(micro_batch.counts)
        loss, _ = value_loss_sum(scores.values, items.values, items.returns, weights, **bounds)
        return loss, loss.detach().view(1)

    def help_learning(self) -> None:
        """Add gradients of 0, pass by pass like the other workers, if they hold shards."""
        count = self.model.most_passes(0)
        for number in range(1, count + 1):
            self.model.backward(0.0 * self.made_up_values().sum(), last=number == count)

    def summed(self, numbers: np.ndarray) -> np.ndarray:
        return self.all_reduce(numbers) if self.world_size > 1 else numbers

    # Checkpoints

    def get_state(self) -> dict[str, np.ndarray]:
        """Whole arrays; of shards only rank 0 returns them, since other workers load rank 0's."""
        arrays = {}
        for name, tensor in self.stored():
            whole = tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))
            if not self.learner.shard or self.rank == 0:
                arrays[name] = whole.cpu().numpy().copy()
        return arrays | ({"updates": np.array(self.updates)} if arrays else {})

    def stored(self) -> Iterator[tuple[str, Tensor]]:
        """The whole tensors of network and optimizer, one at a time; all workers with shards take part."""
        for name, tensor in self.model.policy.state_dict().items():
            yield f"net.{name}", tensor.full_tensor() if is_sharded(tensor) else tensor
        of = dict(self.model.policy.named_parameters())
        for name, tensor in self.optimizer.state_tensors():
            p = of[name.rpartition("/")[0]]
            yield f"optimizer.{name}", whole_of(tensor, p) if is_sharded(p) and tensor.ndim else tensor

    def set_state(self, arrays: dict[str, np.ndarray]) -> None:
        self.updates = int(arrays["updates"])
        with torch.no_grad():
            for name, tensor in self.model.policy.state_dict(keep_vars=True).items():
                local(tensor).copy_(own_rows(arrays[f"net.{name}"], tensor))
            of = dict(self.model.policy.named_parameters())
            for name, tensor in self.optimizer.state_tensors():
                tensor.copy_(own_rows(arrays[f"optimizer.{name}"], of[name.rpartition("/")[0]]))


def own_rows(whole: np.ndarray, like: Tensor) -> Tensor:
    """This worker's rows of an array, if `like` is sharded."""
    array = torch.from_numpy(whole.copy())
    return array[rows_of(like)] if is_sharded(like) and array.ndim else array


class OfRole:
    """A role's workers as ranks that sum tensors."""

    def __init__(self, worker: NetworkWorker) -> None:
        self.worker = worker

    def sum(self, values: Tensor) -> Tensor:
        """In place, like all sums over ranks: `PolicyOptimizer` reads its gradients there."""
        if self.worker.world_size == 1:
            return values
        return values.copy_(torch.as_tensor(self.worker.all_reduce(values.cpu().numpy())))

    def gather(self, rows: np.ndarray) -> list[np.ndarray]:
        """The rows of all workers, which have as many."""
        whole = np.zeros((self.worker.world_size, *rows.shape), rows.dtype)
        whole[self.worker.rank] = rows
        return [*(whole if self.worker.world_size == 1 else self.worker.all_reduce(whole))]


def scores_of_episodes(played: Trajectory, algo: PPOConfig, max_tokens: int) -> np.ndarray:
    """The scores [R] of conversations, as the driver counts them: `score_of`."""
    starts = np.cumsum(played.lengths) - played.lengths

    def per_conversation(column: np.ndarray, how: Callable = np.add) -> list:
        return how.reduceat(np.asarray(column)[:, 0], starts).tolist()

    rewards = per_conversation(np.where(played.mask, played.rewards, 0.0))
    cut, tokens = per_conversation(played.truncated, np.logical_or), per_conversation(played.mask.astype(np.int64))
    return np.array(
        [
            score_of(EpisodeResult(0, "", 0, 0, 1, reward, None, None, truncated=bool(c), tokens=n), algo, max_tokens)
            for reward, c, n in zip(rewards, cut, tokens, strict=True)
        ]
    )


READ_TOGETHER = 32  # conversations in a batch of the classifier


@dataclass(frozen=True)
class Talk:
    """A conversation as text."""

    episode: int
    asked: str  # the conversation before the last answer, without special tokens
    answer: str  # as the env receives it


class ScoringWorker(RelayWorker):
    """Gives each conversation a score by `scores`."""

    def __init__(self, policy: Any, roles: RolesSection, device: str) -> None:
        self.config, self.roles, self.device = policy, roles, device
        self.paid_parts: list[tuple[int, float, int]] = []  # of the batch: first episode, rewards, conversations

    def build(self, spec: EnvSpec, start: Path | None = None) -> None:
        self.tokenizer = tokenizer_of(self.config, spec.max_episode_steps != 1)

    def add(self, parts: list[Trajectory]) -> list[Trajectory]:
        talks = [self.talks(unit) for unit in parts]
        scores = iter(self.scores([talk for said in talks for talk in said]))
        results = [
            self.with_rewards(unit, [next(scores) for _ in said]) for unit, said in zip(parts, talks, strict=True)
        ]
        self.paid_parts += [(int(unit.ids[0]), float(unit.rewards.sum()), len(unit.ids)) for unit in results]
        return results

    def finish(self) -> dict[str, float]:
        parts, self.paid_parts = sorted(self.paid_parts), []
        sums = np.array([sum(rewards for _, rewards, _ in parts), sum(count for *_, count in parts)], np.float64)
        total, count = self.all_reduce(sums) if self.world_size > 1 else sums
        return {"reward/mean": float(total / max(count, 1))}

    def scores(self, talks: Sequence[Talk]) -> list[float]:
        raise NotImplementedError

    def talks(self, trajectory: Trajectory) -> list[Talk]:
        """The conversations of a group."""
        result = []
        for episode, end, length in zip(
            trajectory.ids.tolist(), np.cumsum(trajectory.lengths), trajectory.lengths, strict=True
        ):
            tokens, sampled = trajectory.actions[end - length : end, 0, 0], trajectory.mask[end - length : end, 0]
            restarts = trajectory.obs[RESTART][end - length : end] if RESTART in trajectory.obs else sampled[:0]
            first = int(np.flatnonzero(restarts).max(initial=0))
            last = int(np.flatnonzero(~sampled).max(initial=-1)) + 1  # begin of the last answer
            written = tokens[last:].tolist()
            answer = self.tokenizer.decode(written[:-1] if written and written[-1] in self.tokenizer.stops else written)
            result.append(Talk(episode, self.tokenizer.plain_text(tokens[first:last]), answer))
        return result

    def with_rewards(self, trajectory: Trajectory, scores: list[float]) -> Trajectory:
        if odd := [score for score in scores if not np.isfinite(score)]:
            raise ConfigError(f"roles.{self.roles.scorer} gave the reward {odd[0]}; it must be a finite number")
        weight = self.roles.reward_weight
        rewards = np.array(trajectory.rewards) if weight is not None else np.zeros_like(trajectory.rewards)
        rewards[np.cumsum(trajectory.lengths) - 1, 0] += np.array(scores) * (1.0 if weight is None else weight)
        return replace(trajectory, rewards=rewards)


class VerifierWorker(ScoringWorker):
    def build(self, spec: EnvSpec, start: Path | None = None) -> None:
        super().build(spec, start)
        self.verify = import_class(self.roles.verifier, "roles.verifier")

    def scores(self, talks: Sequence[Talk]) -> list[float]:
        with explain_errors(f"roles.verifier={self.roles.verifier}", "score an answer"):
            return [float(self.verify(talk.asked, talk.answer)) for talk in talks]


class ClassifierWorker(ScoringWorker):
    """Reads conversations with a sequence classifier of transformers."""

    def build(self, spec: EnvSpec, start: Path | None = None) -> None:
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        from embodied.policies.language.folder import BUILDING

        super().build(spec, start)
        self.belongings, self.computing = DeviceTensors(self.timers), Computing()
        folder = as_path(self.roles.reward_model)
        options = {"local_files_only": True, "trust_remote_code": False}
        try:
            self.words = AutoTokenizer.from_pretrained(folder, **options)
            with BUILDING:
                model = AutoModelForSequenceClassification.from_pretrained(folder, **options)
            self.model = model.eval().to(self.device)
        except Exception as err:  # transformers raises many kinds
            cause = str(err).strip().splitlines()[0] if str(err).strip() else type(err).__name__
            raise CheckpointError(f"roles.reward_model={folder} is not a sequence classifier: {cause}") from None
        self.model.requires_grad_(False)
        if self.words.pad_token is None:
            self.words.pad_token = self.words.eos_token
        self.words.truncation_side = "left"  # an answer's end counts
        longest = getattr(model.config, "max_position_embeddings", None) or self.words.model_max_length
        self.longest = min(longest, self.words.model_max_length)
        self.model.config.pad_token_id = self.words.pad_token_id

    def scores(self, talks: Sequence[Talk]) -> list[float]:
        rewards: list[float] = []
        with torch.no_grad(), self.computing.measured():
            for first in range(0, len(talks), READ_TOGETHER):
                self.tick()
                texts = [talk.asked + talk.answer for talk in talks[first : first + READ_TOGETHER]]
                how = {"padding": True, "truncation": True, "max_length": self.longest}
                read = self.words(texts, return_tensors="pt", **how).to(self.device)
                logits = self.model(input_ids=read["input_ids"], attention_mask=read["attention_mask"]).logits.float()
                rewards += (logits[:, 0] if logits.shape[1] == 1 else logits.softmax(-1)[:, -1]).tolist()
        return rewards

    def needs(self, shared: bool = False) -> Needs:
        return Needs(num_bytes(self.model.parameters()) + self.computing.num_bytes)

    def onload(self) -> None:
        self.belongings.onload()

    def offload(self) -> None:
        if not self.belongings.away:
            self.belongings.offload({"network": [*self.model.parameters(), *self.model.buffers()]})
            give_back_unused()


class JudgedWorker(ScoringWorker):
    """Asks a language model about each conversation, over the queue of the model's workers."""

    merges = True  # the model answers many questions together

    def connect(self, answerers: Answerers) -> None:
        self.client = JudgeClient(answerers, room=self.config.max_running)

    def scores(self, talks: Sequence[Talk]) -> list[float]:
        questions = [self.question(talk) for talk in talks]
        verdicts = self.client.ask([*dict.fromkeys(questions)], self.tick)  # equal answers are asked about once
        says = self.roles.judge_says
        return [
            float(verdicts[asked].strip().startswith(says) if says else verdicts[asked].strip() == talk.answer.strip())
            for talk, asked in zip(talks, questions, strict=True)
        ]

    def question(self, talk: Talk) -> str:
        parts = {"{asked}": talk.asked, "{answer}": talk.answer}  # either may hold the other's name
        return re.sub("{asked}|{answer}", lambda name: parts[name[0]], self.roles.judge_prompt)


class JudgeClient(RequestClient):
    """The client's end of the queue. A judge gets more questions as it answers, so a slow judge gets fewer. A
    question's number is also the number of its noise, which has no effect: a judge takes the likeliest tokens."""

    number = 0

    def ask(self, questions: Sequence[str], tick: Any) -> dict[str, str]:
        """The answers by question."""
        asked = dict(enumerate(questions, self.number))
        self.number += len(asked)
        self.put(*(Waiting(n, Prompt(n, n, text), 1, n, False) for n, text in asked.items()))
        answers: dict[str, str] = {}
        while len(answers) < len(asked):
            batch = self.get()
            tick()
            for completion in batch.completions if batch else ():
                if self.queue.take_answer(completion.number):
                    answers[asked[completion.number]] = completion.text
            self._send()
        return answers

    def messages(self, requests: list[Prompt]) -> list[PromptBatch]:
        return [PromptBatch(self.source, tuple(requests))]


class JudgeWorker(LanguageWorker):
    """A language model whose weights never change, with an engine that answers reward workers."""

    def __init__(self, policy: LanguageConfig, roles: RolesSection, seed: int, device: str) -> None:
        super().__init__(roles.judge_policy(policy), seed, device=device)
        self.judge = roles.judge
        self.weights = SimpleNamespace(acting=acting, version=0, close=lambda: None)

    def build(self, spec: EnvSpec, start: Path | None = None) -> None:
        super().build(spec)
        self.policy.initialise(np.random.default_rng(self.seed))
        if self.judge == "start" and start is not None:  # a timed run begins with new weights
            self.policy.begin_with(read_weights(start))
        self._load_engine(0)


def acting(version: int) -> AbstractContextManager[None]:
    """Do nothing: a judge has its own weights, so it waits for no update."""
    return nullcontext()
