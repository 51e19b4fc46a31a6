"""algo.imitation: every gradient step of RL also imitates, and the weights depend on neither learners nor schedule."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import stepped
import torch
from talking_runs import APART, ONE_OF_EACH, Talk, far
from written_datasets import SPEC, write_new

from embodied import train
from embodied.algorithms.imitation import KeptImitation
from embodied.core.errors import ConfigError
from embodied.learners.imitation import ImitatingLearner
from embodied.learners.model import Model
from embodied.learners.update import GradientSteps
from embodied.policies.policy_folder import read_weights
from embodied.workflows.demonstrations import check_kept_data

ADAM = ["algo.adam_eps=0.1", "algo.lr=0.01"]  # with a small one, Adam steps as far whatever a gradient is divided by
ONE_LEARNER = {"sim": "cpu:0-1*2", "policy": "cpu:2", "learner": "cpu:3"}
LOSS = "train/imitation_loss"


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    demos = write_new(tmp_path_factory.mktemp("demos") / "a", SPEC)  # 22 items
    return f"algo.imitation={{data: {demos}, weight: 0.5, decay: 0.5, minibatch_size: 9}}"


def played(folder, *arguments, **more):
    folder.mkdir(exist_ok=True)
    with stepped.Run(folder, *arguments, **more) as run:
        rows = run.play(0, 2)
        return [numbers for _, numbers in rows], run.weights()


def test_one_and_two_learners_take_the_same_steps(kept, tmp_path):
    ppo = [*stepped.PPO, *ADAM]
    rows, alone = played(tmp_path / "1", *ppo, kept, placement=ONE_LEARNER)
    others, shared = played(tmp_path / "2", *ppo, kept, placement=stepped.TWO_LEARNERS)
    assert far(shared, alone) < 1e-10
    assert [row[LOSS] for row in rows] == pytest.approx([row[LOSS] for row in others], rel=1e-9)
    assert [row["train/imitation_weight"] for row in rows] == [0.5, 0.25]
    without = played(tmp_path / "3", *ppo, placement=ONE_LEARNER)[1]
    assert far(without, alone) > 1e-3


def test_periodic_equals_sync_with_imitation_where_an_update_has_one_step(kept, tmp_path):
    grpo = [*stepped.GRPO[:-1], *ADAM, *stepped.ONE_STEP, kept]
    rows, sync = played(tmp_path / "1", *grpo, placement=ONE_LEARNER)
    others, periodic = played(
        tmp_path / "2", *grpo, "pipeline.schedule=periodic", placement={**ONE_LEARNER, "learner": "cpu:2-3*2"}
    )
    assert far(periodic, sync) < 1e-10 and min(row["train/grad_norm"] for row in rows) > 1e-3
    assert [row[LOSS] for row in rows] == pytest.approx([row[LOSS] for row in others], rel=1e-9)


def test_imitation_of_conversations_gives_the_same_weights_for_any_number_of_learners(tmp_path):
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps({"prompt": f"{n}?", "answer": str(n % 10)}) + "\n" for n in range(20, 33)))
    kept = f"algo.imitation={{data: {lines}, weight: 1.0, minibatch_size: 5}}"
    found = []
    for name, placement in (("1", ONE_OF_EACH), ("2", APART)):
        with Talk(tmp_path / name, kept, placement=placement) as run:
            found.append(([row for _, row in run.some(2)], run.weights()))
    (rows, alone), (_, shared) = found
    assert far(shared, alone) < 1e-10
    assert rows[1][LOSS] < rows[0][LOSS]


def test_a_resumed_run_that_also_imitates_gives_the_same_weights(kept, tmp_path):
    short = [one for one in stepped.PPO if not one.startswith("run.iterations")]
    short += [kept, "cluster.backend=inline"]
    short += ["eval.episodes=1", "eval.videos=0", "run.save_every=1", "run.keep=null", f"run.dir={tmp_path}"]
    whole = train(*short, "run.iterations=2").folder
    first = shutil.copytree(whole, tmp_path / "first")
    shutil.rmtree(first / "checkpoints" / "v000002")
    train(f"resume={first}")
    ends = [read_weights(run / "checkpoints" / "v000002" / "policy") for run in (whole, first)]
    assert all(np.array_equal(ends[0][name], ends[1][name]) for name in ends[0])


class Numbers:
    """Demonstrations whose actions are their numbers."""

    first, total = 0, 5

    def __len__(self):
        return 5

    def batch(self, rows):
        return {"actions": rows, "mask": torch.ones(len(rows), 1, dtype=torch.bool)}


def test_the_gradient_is_that_of_the_weighted_mean_and_spares_the_deviation(tmp_path):
    """Items 0 to 4 with the loss (w - item)^2 + deviation at w = 1: a minibatch of 5 has the mean of 1 0 1 4 9 = 3, and
    the gradient 2 * (1 + 0 - 1 - 2 - 3) / 5 = -2; of weight 0.5, decayed twice by 0.5, times a count of 8: -2."""
    w, deviation = torch.ones(1, requires_grad=True), torch.zeros(1, requires_grad=True)
    learner = object.__new__(ImitatingLearner)
    learner.seed, learner.device, learner.config = 0, "cpu", SimpleNamespace(micro_batch_size=2)
    learner.algo = SimpleNamespace(imitation=KeptImitation(weight=0.5, decay=0.5, minibatch_size=7))
    learner.demos = Numbers()
    learner.policy = SimpleNamespace(auxiliary_loss="", deviations=lambda: [deviation], imitation_noise=lambda: None)
    learner.model = SimpleNamespace(
        table=None,
        dtype=torch.float32,
        device="cpu",
        imitate=lambda inputs, noise: ((w - inputs["actions"]).square() + deviation, None),
        backward=lambda loss, last: loss.backward(),
        passes=lambda micro_batches, padding: Model.passes(
            SimpleNamespace(most_passes=lambda passes: 0), micro_batches, padding
        ),
    )
    steps = GradientSteps(learner.model, None, ["policy_loss", "imitation_loss"])
    learner.imitate_too(steps, 2, 10.0, 8.0)
    assert w.grad.item() == pytest.approx(-2.0) and deviation.grad is None and deviation.requires_grad
    assert steps.sums.tolist() == pytest.approx([0.0, 30.0])


def test_a_robots_missing_demonstrations_are_refused(tmp_path):
    config = stepped.Run(tmp_path, *stepped.PPO, "algo.imitation={weight: 1.0}").config
    with pytest.raises(ConfigError, match=r"then algo.imitation={data: demos/A}"):
        check_kept_data(config)
