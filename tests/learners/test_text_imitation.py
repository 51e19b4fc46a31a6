"""Imitation of answers: what is learned from a conversation, and that it is the same however it is shared out."""

import json
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from announced import imitate
from imitating_policy import Characters
from tiny_language import PLAIN, publish

from embodied.algorithms.config import SFTConfig
from embodied.config.recipe import load
from embodied.core.errors import ConfigError
from embodied.core.rng import generator
from embodied.core.types import EpisodeSpec
from embodied.envs.config import ExternalEnvConfig
from embodied.envs.text.text_env import TextEnv, Turn
from embodied.learners.config import LearnerConfig
from embodied.learners.examples import read_examples, solved_examples
from embodied.learners.imitation import ExampleTokens, TextImitationLearner, into_packs, written
from embodied.policies import make_policy
from embodied.policies.config import ExternalPolicyConfig
from embodied.run.rehearsal import check_before
from embodied.runtime.rendezvous import InProcessRendezvous
from embodied.runtime.worker import Timers
from embodied.sft import main
from embodied.workflows.demonstrations import check_data

HERE = "tests.learners.test_text_imitation"


class Doubling(TextEnv):
    """Asks for twice a number."""

    def reset(self, spec: EpisodeSpec):
        self.number = int(generator(spec.seed, "doubling").integers(100))
        return f"2*{self.number}="

    def step(self, answer):
        right = answer == str(2 * self.number)
        return Turn(reward=float(right), success=right)

    def solution(self):
        return str(2 * self.number)


class Counting(Doubling):
    """Asks for the next number twice."""

    def reset(self, spec):
        self.turns = 0
        return "1,"

    def step(self, answer):
        self.turns += 1
        return Turn(said=",3,", done=False) if self.turns == 1 else Turn(1.0)

    def solution(self):
        return "24"[self.turns]


class Riddle(Doubling):
    def solution(self):
        return None


def env(kind="Doubling"):
    return ExternalEnvConfig(name=f"{HERE}:{kind}")


def learner(config, env_config=None, rank=0, ranks=1, room=None, pack_tokens=4096, **kwargs):
    policy = ExternalPolicyConfig(name="imitating_policy:ImitatingPolicy", kwargs=kwargs)
    options = LearnerConfig(pack_tokens=pack_tokens)
    made = TextImitationLearner(env_config or env(), policy, config, options, 3, room)
    made.rank, made.world_size, made.timers = rank, ranks, Timers()
    made.build(Doubling.env_spec(env_config or env()), f"test-{rank}", False)
    return made


def trained(config, passes=2, **options):
    one = learner(config, **options)
    one.open_data()
    numbers = [imitate(one, iteration, config.epochs) for iteration in range(passes)]
    weights = {name: tensor.clone() for name, tensor in one.policy.state_dict().items()}
    one.close()
    return numbers, weights


def sft(**changes):
    return SFTConfig(**{"episodes": 45, "epochs": 2, "minibatch_size": 16, "lr": 1e-2} | changes)


def equal(one, other):
    assert all(torch.allclose(one[name], other[name], rtol=0, atol=1e-10) for name in one)


def test_an_answer_is_learned_with_the_token_that_ends_it():
    ((tokens, mask),) = written(Characters(), (("5+6=", "11"),))
    assert tokens.tolist() == [2, *map(ord, "5+6=11"), 0]
    assert mask.tolist() == [False] * 5 + [True] * 3


def test_a_learner_gives_a_sign_of_life_after_each_example_that_it_plays():
    one, signs = learner(sft()), []
    one.tick = lambda: signs.append(1)
    assert one.open_data() == len(signs) == 45
    one.close()


def test_all_answers_of_several_turns_are_imitated():
    (example,) = solved_examples(env("Counting"), 0, range(1))
    assert example == (("1,", "2"), (",3,", "4"))
    ((tokens, mask),) = written(Characters(), example)
    assert tokens.tolist() == [2, *map(ord, "1,2"), 0, *map(ord, ",3,4"), 0]
    assert np.flatnonzero(mask).tolist() == [3, 4, 8, 9]


def test_a_prompt_follows_from_its_number_and_the_seed():
    assert (
        solved_examples(env(), 3, range(4, 9))
        == solved_examples(env(), 3, range(12))[4:9]
        != solved_examples(env(), 4, range(4, 9))
    )


def test_conversations_go_through_the_network_as_the_tokens_allow():
    cuts = into_packs([3, 2, 4, 9, 1], 6)
    assert [(cut.start, cut.stop) for cut in cuts] == [(0, 2), (2, 3), (3, 4), (4, 5)]
    assert into_packs([], 6) == []


def test_the_loss_is_the_mean_over_the_answers_tokens():
    one = learner(sft(episodes=3, epochs=1, minibatch_size=3, lr=0.0))
    one.open_data()
    sizes, policy = one.demos.sizes, one.policy
    assert len({*sizes[:, 1].tolist()}) > 1, "answers of several lengths"
    with torch.no_grad():
        losses = [policy.imitate(one.demos.batch(torch.tensor([item])), None).sum() for item in range(3)]
    (numbers,) = [imitate(one, 0, 1)]
    assert numbers["train/loss"] == pytest.approx(float(sum(losses)) / sizes[:, 1].sum(), abs=1e-12)
    one.close()


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_iterations_of_few_steps_make_the_steps_of_whole_passes(schedule):
    """45 conversations are 3 gradient steps a pass: iterations of 2 and 1."""
    whole = sft(lr_schedule=schedule)
    parts = sft(lr_schedule=schedule, steps=2)
    assert (whole.iterations(45), parts.iterations(45)) == (2, 4)
    assert [[*parts.minibatches(45, n)[1]] for n in range(4)] == [[0, 1], [2], [0, 1], [2]]
    one = learner(parts)
    one.open_data()
    for iteration in range(4):
        imitate(one, iteration, 4)
    equal(trained(whole)[1], one.policy.state_dict())
    one.close()


def test_a_model_imitates_worked_solutions_of_a_file_and_is_evaluated_on_the_way(tmp_path, capsys):
    pytest.importorskip("math_verify")
    folder = publish(tmp_path / "model", "qwen3", False, PLAIN, positions=256)
    rows = [{"question": f"{n}+1?", "answer": f"It is \\boxed{{{n + 1}}}."} for n in range(40)]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = [f"policy.pretrained={folder}", f"sft.data={tmp_path / 'q.jsonl'}", f"env.file={tmp_path / 'q.jsonl'}"]
    words += ["policy.max_tokens=24", "policy.max_length=200", "sft.minibatch_size=10", "sft.steps=2", "sft.epochs=1"]
    words += ["policy.engine=transformers", "policy.cache_gb=null", "policy.dtype=float32", "sft.warmup_steps=0"]
    words += [
        "sft.lr=0.01",
        "eval.episodes=2",
        "env.num_envs=2",
        f"run.dir={tmp_path / 'runs'}",
        "cluster.backend=inline",
    ]
    assert main(["recipe=math_sft", *words, 'placement={"sim,policy": "cpu:0", learner: "cpu:0"}']) == 0
    assert "evaluations ask questions that are imitated" in capsys.readouterr().out
    (run,) = (tmp_path / "runs").iterdir()
    assert {path.name for path in (run / "eval").iterdir()} == {"v000001", "v000002"}
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["env_steps"] for row in rows] == [20, 40] and rows[1]["train/loss"] < rows[0]["train/loss"]


@pytest.mark.parametrize("pack_tokens", [1, 20])
def test_small_passes_add_up_to_the_same_steps(pack_tokens):
    whole, one = trained(sft()), trained(sft(), pack_tokens=pack_tokens)
    equal(whole[1], one[1])
    assert whole[0][1]["train/loss"] == pytest.approx(one[0][1]["train/loss"], abs=1e-10)


def test_padding_passes_of_imitation_add_nothing():
    (_, numbers), weights = trained(sft())
    padded = learner(sft())
    padded.open_data()
    padded.model.most_passes = lambda passes: passes + 2
    rows = [imitate(padded, iteration, 2) for iteration in range(2)]
    equal(weights, padded.policy.state_dict())
    assert rows[1]["train/loss"] == pytest.approx(numbers["train/loss"], abs=1e-10)
    padded.close()


def test_two_learners_imitating_texts_take_the_steps_of_one():
    config, room = sft(warmup_steps=3, weight_decay=0.1), InProcessRendezvous(2, 30.0)
    alone = trained(config)
    with ThreadPoolExecutor(2) as pool:
        ranks = [pool.submit(trained, config, rank=rank, ranks=2, room=room) for rank in range(2)]
        found = [one.result(60) for one in ranks]
    equal(alone[1], found[0][1])
    equal(found[0][1], found[1][1])
    assert found[0][0][1]["train/loss"] == pytest.approx(alone[0][1]["train/loss"], abs=1e-10)


def test_a_policy_learns_the_answers():
    numbers, _ = trained(sft(episodes=400, epochs=12, lr_schedule="constant"), passes=12)
    losses = [row["train/loss"] for row in numbers]
    assert losses[-1] < 0.4 * losses[0]


def test_learning_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(tmp_path):
    config = sft(epochs=3)
    _, straight = trained(config, passes=3)
    first = learner(config)
    first.open_data()
    imitate(first, 0, 3)
    first.save(tmp_path)
    first.close()
    second = learner(config)
    second.open_data()
    second.load(tmp_path)
    for iteration in (1, 2):
        imitate(second, iteration, 3)
    assert all(torch.equal(straight[name], tensor) for name, tensor in second.policy.state_dict().items())
    second.close()


def test_a_file_holds_prompts_or_messages(tmp_path):
    path = tmp_path / "examples.jsonl"
    chat = [{"role": "user", "content": "1+1?"}]
    lines = [{"prompt": "1+2=", "answer": "3"}, {"messages": chat, "answer": "2", "source": "mine"}]
    path.write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    (tmp_path / "q.jsonl").write_text('{"question": "1+1?", "answer": "It is \\\\boxed{2}."}')
    (((said, answer),),) = read_examples(tmp_path / "q.jsonl")
    assert said[0]["content"].startswith("1+1?\nReason step by step") and answer == "It is \\boxed{2}."
    assert read_examples(path) == [(("1+2=", "3"),), ((tuple(chat), "2"),)]
    assert len(read_examples(path, 1)) == 1
    (tmp_path / "a.png").write_bytes(b"")
    (tmp_path / "p.jsonl").write_text(json.dumps({"question": "<image>x?", "images": ["a.png"], "answer": "3"}))
    ((((message,), _),),) = read_examples(tmp_path / "p.jsonl")
    assert message["content"][0] == {"type": "image", "image": str(tmp_path / "a.png")}
    one = learner(sft(data=path, episodes=None, minibatch_size=1, epochs=1))
    assert one.open_data() == 2
    one.close()


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("", "holds no examples"),
        ("{", "line 1: "),
        ("[]", "line 1: list, it must be an object"),
        ('{"prompt": "a"}', "no answer as text"),
        ('{"prompt": "", "answer": "b"}', "no question"),
        ('{"messages": [{"role": "robot", "content": "a"}], "answer": "b"}', "system|user|assistant"),
    ],
)
def test_an_invalid_examples_file_is_refused_with_its_line(tmp_path, line, reason):
    path = tmp_path / "examples.jsonl"
    path.write_text(line)
    with pytest.raises(ConfigError, match=r"examples\.jsonl.*sft\.data is JSONL") as caught:
        read_examples(path)
    assert reason in str(caught.value)


def test_an_env_without_solutions_names_both_ways_out():
    with pytest.raises(ConfigError, match=r"sft\.data=FILE\.jsonl .* or let the env's method `solution`.*'2\*\d+='"):
        learner(sft(), env("Riddle")).open_data()


def test_answers_that_the_policy_could_not_say_are_refused():
    policy = make_policy(ExternalPolicyConfig(name="imitating_policy:ImitatingPolicy"), None, 0)
    policy.config, policy.max_length = SimpleNamespace(max_tokens=3), 9
    assert len(ExampleTokens(policy, [(("1234=", "56"),)], 0, 1)) == 1
    with pytest.raises(ConfigError, match=r"example 8 \('1='\): an answer of 4 tokens.*try policy\.max_tokens=4"):
        ExampleTokens(policy, [(("1=", "567"),)], 7, 8)
    with pytest.raises(ConfigError, match="a conversation of 10 tokens does not fit into the model's 9"):
        ExampleTokens(policy, [(("123456=", "5"),)], 0, 1)


def test_a_warm_up_that_never_ends_is_refused_before_anything_starts_and_too_few_examples_are():
    late = load(["recipe=sums_sft", "sft.episodes=45", "sft.minibatch_size=16", "sft.epochs=2"], entry="sft").config
    with pytest.raises(ConfigError, match=r"6 gradient steps of sft\.epochs=2 over 45 conversations"):
        check_data(late.with_values("sft", warmup_steps=6))
    check_data(late.with_values("sft", warmup_steps=5))
    with pytest.raises(ConfigError, match="2 learners share 1 examples"):
        of_two().open_data()
    early = load(["recipe=sums_sft", "sft.episodes=1"], entry="sft").config
    with pytest.raises(ConfigError, match="2 learners share 1 examples"):
        check_before(early, early.sft, 2)


def of_two():
    one = learner(sft(episodes=1))
    one.world_size = 2
    return one
