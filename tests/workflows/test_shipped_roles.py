"""Roles that a recipe adds: a reference, a critic, and what scores answers: a function, a classifier, a judge."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import stepped
import torch
from language_models import answers
from served_language import SECRET, served
from talking_runs import Talk, far, program
from tiny_language import build, publish
from transformers import AutoModelForSequenceClassification, LlamaConfig

from embodied import train
from embodied.config.recipe import load
from embodied.core.conversations import Completion, CompletionBatch
from embodied.core.errors import WorkerFailed
from embodied.core.types import Answerers
from embodied.policies.language.engine import Request, make_engine
from embodied.policies.language.tokenizer import of_characters
from embodied.policies.policy_folder import read_weights
from embodied.serving.config import TOKEN
from embodied.workflows import roles, roles_of_run
from embodied.workflows.rl_loop import EmbodiedLoop
from embodied.workflows.roles import JudgeClient, JudgeWorker

COMPARED = ["algo.kl_coef=0.3", "algo.filter=none"]
PPO = ["recipe=sums_ppo", "algo.name=ppo", "algo.minibatch_size=10", "algo.groups=20", "algo.group_size=1"]
SLOWLY = ["run.iterations=40", "algo.warmup_iterations=19"]
CRITIC = [*PPO, "policy.value_head=false", "roles.critic=true", "algo.lr=0", "roles.critic_lr=0.01"]
PLACES = {"sim": "cpu:0", "policy": "cpu:1", "learner": "cpu:2"}


def even(asked, answer):
    """A verifier: 1 for answers that begin with an even digit, to questions as they were asked."""
    assert asked.endswith("=")
    return float(answer[:1] in [*"02468"])


def placed(**roles):
    return PLACES | roles


@pytest.mark.parametrize(
    ("options", "schedule"),
    [(["algo.kl_in=reward", "algo.name=reinforce++", "algo.scale=batch"], "sync"), (["algo.kl_in=loss"], "periodic")],
    ids=["reward", "loss"],
)
def test_weights_are_those_of_a_reference_inside_the_learners(options, schedule, tmp_path):
    words, more = [*COMPARED, *options], ["roles.reference=true", f"pipeline.schedule={schedule}"]
    with Talk(tmp_path / "inside", *words, placement=PLACES) as run:
        inside = run.some(2) and run.weights()
    with Talk(tmp_path / "apart", *words, *more, placement=placed(reference="fake:0-1")) as run:
        assert run.loop.learners[0].needs().wait()[0].num_bytes > 0
        rows, apart = run.some(2), run.weights()
    assert far(apart, inside) < 1e-9
    assert rows[-1][1]["train/reference_kl"] > 1e-4


def test_the_reference_of_robots_is_that_of_the_learners(tmp_path):
    words = [*stepped.PPO, "algo.kl_coef=0.3"]
    places, found = {"sim": "fake:0-1", "policy": "fake:1", "learner": "fake:2-3"}, []
    in_pieces, beside_a_learner = ("fake:4", "pipeline.granularity=5"), ("fake:2",)
    for place, *more in (("",), in_pieces, beside_a_learner):
        own = {"reference": place} if place else {}
        with stepped.Run(tmp_path, *words, *more, f"roles.reference={bool(own)}", placement=places | own) as run:
            assert run.play(0, 2)[-1][1]["train/reference_kl"] > 1e-6
            found.append(run.weights())
    assert max(far(apart, found[0]) for apart in found[1:]) < 1e-9


def test_a_critic_learns_what_conversations_come_to_and_resumes(tmp_path):
    """The policy stays as it is (lr 0), so that what its answers come to can be learned."""
    with Talk(tmp_path / "run", *CRITIC, placement=placed(critic="fake:0-1")) as run:
        rows = [numbers for _, numbers in run.some(4)]
        state = run.loop.workers.save()
    losses = [row["critic/value_loss"] for row in rows]
    assert np.mean(losses[-2:]) < 0.8 * losses[0]
    assert all(row["train/value_loss"] == 0 and row["train/grad_norm"] > 0 for row in rows)
    assert {name.partition(".")[0] for name in state} == {"critic-0", "critic-1"}
    first, second = ({name[9:]: each for name, each in state.items() if name[:8] == f"critic-{n}"} for n in (0, 1))
    assert all(np.array_equal(array, second[name]) for name, array in first.items()), "they learn as one"
    with Talk(tmp_path / "again", *CRITIC, *SLOWLY, placement=placed(critic="fake:0-1")) as run:
        run.loop.workers.restore(dict(state))
        assert all(np.array_equal(array, state[name]) for name, array in run.loop.workers.save().items())
        ((_, numbers),) = run.some(1)
        assert numbers["critic/lr"] == pytest.approx(0.01 * 5 / 20), "the fifth update"


@pytest.mark.slow
def test_a_critic_and_a_reference_with_shards_learn_and_tell_what_whole_ones_do(tmp_path):
    """Two groups and three critics, one of which only helps the others; states are loaded with shards and without."""
    words = ["algo.kl_coef=0.1", "algo.kl_in=reward", "roles.reference=true", "algo.epochs=2", "algo.lr=0.01"]
    words += ["algo.groups=2", "algo.group_size=5", "algo.minibatch_size=5", "env.num_envs=5"]
    words = [*{word.partition("=")[0]: word for word in (*CRITIC, *words)}.values()]
    places = placed(learner="cpu:2-3*2", critic="fake:0-2", reference="fake:3-4")
    told, weights, states = [], [], []
    for shard in ("true", "false"):
        options = {"placement": places, "backend": "local"}
        with Talk(tmp_path / shard, *words, f"learner.shard={shard}", **options) as run:
            told.append([numbers for _, numbers in run.some(2)])
            weights.append(run.weights())
            states.append(run.loop.workers.save())
            run.loop.workers.restore(dict(states[0]))
            again = run.loop.workers.save()
            assert all(np.array_equal(array, again[name]) for name, array in states[0].items())
    assert far(*weights) < 1e-9
    sharded, whole = ({name[9:]: each for name, each in state.items() if name[:8] == "critic-0"} for state in states)
    assert sharded.keys() == whole.keys() and far(sharded, whole) < 1e-9
    assert not any(name.startswith("critic-1") for name in states[0])
    for one, other in zip(*told, strict=True):
        for key in ("critic/value_loss", "critic/explained_variance", "train/reference_kl"):
            assert one[key] == pytest.approx(other[key], rel=1e-9)


def scored(folder, *words, **roles):
    """What each conversation of an iteration was asked, its answer and its reward, with these roles."""
    with Talk(folder, "algo.filter=none", "run.samples=20", *words, placement=placed(**roles)) as run:
        run.some(1)
        samples, refs = run.loop.collector.samples, run.loop.collector.refs
    rewards = {one["index"]: refs[one["index"]].result.total_reward for one in samples}
    return [(one["turns"][0]["said"], one["turns"][0]["answer"], rewards[one["index"]]) for one in samples]


def test_a_verifier_and_a_classifier_replace_rewards(tmp_path):
    for asked, answer, reward in scored(tmp_path / "v", f"roles.verifier={__name__}:even", reward="fake:0-1"):
        assert reward == even(asked, answer)
    classifier, sizes = tmp_path / "classifier", {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    shape = LlamaConfig(
        vocab_size=100, num_attention_heads=2, num_labels=1, pad_token_id=0, max_position_embeddings=6, **sizes
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_config(shape).eval()
    model.save_pretrained(classifier)
    own = of_characters().base
    own.save_pretrained(classifier)
    words = [f"roles.reward_model={classifier}", "roles.reward_weight=10"]
    found = scored(tmp_path / "c", *words, reward="fake:0-1")
    for asked, answer, reward in found:
        with torch.no_grad():
            logit = float(model(torch.tensor([own(asked + answer)["input_ids"][-6:]])).logits)
        assert reward == pytest.approx(float(any(digit in answer for digit in "02468")) + 10 * logit, abs=1e-4)
    assert len({reward for *_, reward in found}) > 10
    assert max(len(own(asked + answer)["input_ids"]) for asked, answer, _ in found) > 6  # some are too long to be read


def test_judges_are_asked_over_their_queue(tmp_path):
    """The likeliest answer of a fresh model to the same question is the right one."""
    folder = publish(tmp_path / "model", "qwen3", False)
    words = [f"roles.judge={folder}", "roles.judge_tokens=3", "roles.judge_prompt=Q{asked}A{answer}"]
    policy = build(pretrained=str(folder), max_tokens=3)

    def judged(text):
        request = Request(0, policy.tokenizer.encode(text, first=True), 3, 0)
        (answer,) = answers(make_engine(policy.config, policy), [request], 0.0).values()
        return policy.tokenizer.decode(
            [token for token in answer.tokens.tolist() if token not in policy.tokenizer.stops]
        )

    first = judged("Q1+1=A2")[:1]
    for asked, answer, reward in scored(
        tmp_path / "judged", *words, f"roles.judge_says={first}", reward="fake:0-1", judge="fake:2-3"
    ):
        assert reward == float(judged(f"Q{asked}A{answer}").strip().startswith(first))


def test_a_resumed_run_is_judged_by_the_policy_that_it_started_from(tmp_path, monkeypatch):
    start, folder, judges, build_judge = tmp_path / "start", tmp_path / "runs", [], JudgeWorker.build
    build(preset="tiny_gpt2", dtype="float64", seed=7).save_pretrained(start)

    def noted(worker, *given):
        build_judge(worker, *given)
        judges.append(tmp_path / f"judge-{len(judges)}")
        worker.policy.save_pretrained(judges[-1])

    monkeypatch.setattr(JudgeWorker, "build", noted)
    words = [f"run.start_from={start}", "roles.judge=start", "run.iterations=1"]
    words.append("placement={'sim,policy': 'cpu:0', 'learner,reward,judge': 'cpu:1'}")
    assert train.main(program(folder, *words)) == 0
    (run,) = folder.iterdir()
    assert train.main([f"resume={run}", "run.iterations=2"]) == 0
    assert [far(read_weights(judge), read_weights(start)) for judge in judges] == [0, 0]


def test_a_judge_has_an_engine_of_its_own_where_servers_answer_for_the_policy(tmp_path, monkeypatch):
    monkeypatch.setenv(TOKEN, SECRET)
    judge = publish(tmp_path / "judge", "qwen3", False)
    words = [f"roles.judge={judge}", "roles.judge_tokens=3", "roles.judge_says=x"]
    places = {"reward": "fake:0", "judge": "fake:1"}
    alone = scored(tmp_path / "own", *words, **places)
    with served(build(preset="tiny_gpt2", dtype="float64", max_running=8, seed=7), tmp_path) as server:
        asked = ["policy.engine=http", f"policy.url={server.url}", f"policy.weights={tmp_path / 'weights'}"]
        assert scored(tmp_path / "served", *words, *asked, **places) == alone


class Judges:
    """The channels of two judges, of which one answers nothing while the other has questions, and their replies."""

    def __init__(self):
        self.asked = {name: [] for name in ("fast", "slow")}
        self.waiting = []

    def take(self, name, batch):
        self.asked[name] += [one.said for one in batch.prompts]
        self.waiting += [(name, one) for one in batch.prompts]
        self.waiting.sort(key=lambda each: each[0])

    def get(self, timeout_s=None):
        name, one = self.waiting.pop(0)
        nothing = np.zeros(0, np.int32)
        return CompletionBatch("reward-0", (Completion(one.number, nothing, nothing, 0, f"{name} {one.said}"),))


def test_a_judge_that_answers_slowly_is_asked_less():
    judges = Judges()
    channels = {name: SimpleNamespace(put=partial(judges.take, name)) for name in judges.asked}
    client = JudgeClient(Answerers("reward-0", channels, replies=judges), room=2)
    questions = [*"abcdefgh"]
    assert {asked: text[-1] for asked, text in client.ask(questions, lambda: None).items()} == dict(
        zip(questions, questions, strict=True)
    )
    assert {name: len(asked) for name, asked in judges.asked.items()} == {"fast": 6, "slow": 2}


def test_a_judge_reads_names_of_its_prompt_in_a_conversation_as_text():
    worker = SimpleNamespace(roles=SimpleNamespace(judge_prompt="{asked} Is {answer} right?"))
    talk = roles.Talk(0, "Fill {answer} in.", "{asked}")
    assert roles.JudgedWorker.question(worker, talk) == "Fill {answer} in. Is {asked} right?"


def test_recipes_add_their_roles_to_a_program_that_trains():
    config = load(["recipe=sums_ppo_critic", "roles.reference=true", "algo.kl_coef=0.1", "roles.judge=start"]).config
    names = [role.name for role in roles_of_run(EmbodiedLoop, config)]
    assert names == ["sim", "policy", "learner", "reward", "judge", "reference", "critic"]


def test_a_run_that_lost_a_node_is_planned_again_with_its_critic():
    loaded = load(["recipe=sums_ppo_critic"])
    _, plan = train.without_node(WorkerFailed("learner-0", "its node is gone"), loaded, EmbodiedLoop)
    assert plan.count("critic")
