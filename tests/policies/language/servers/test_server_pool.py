"""Servers that come and go while requests wait for them: every request is answered once, by the wanted weights."""

import contextlib
import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from language_models import answers
from served_language import SECRET, engine_at, served, until
from tiny_language import build

from embodied.core.errors import EmbodiedError
from embodied.core.types import SamplingRule
from embodied.policies.language.engine import Request, make_engine
from embodied.policies.language.http_messages import WeightFolder, fingerprint
from embodied.policies.language.servers import http_engine, server_pool
from embodied.policies.language.servers.remote_server import RemoteServer
from embodied.policies.language.servers.server_pool import WritingSpeed, request_limits
from embodied.policies.language.trials import CheckedAnswer
from embodied.policies.language.trust import LIMITS, GapRecord
from embodied.runtime import published_weights
from embodied.runtime.published_weights import blob_of
from embodied.serving import language_server
from embodied.serving.config import TOKEN

ASKED = [Request(n, [5 + n % 7, 6, 7 + n % 50], 4 + n % 9, episode=n) for n in range(40)]
SIZES = {"preset": "tiny_gpt2", "dtype": "float64", "max_length": 64, "max_running": 4}


@pytest.fixture(autouse=True)
def token(monkeypatch):
    monkeypatch.setenv(TOKEN, SECRET)
    monkeypatch.setattr(server_pool, "WATCH_S", 0.2)
    monkeypatch.setattr(server_pool, "LONGEST_S", 0.2)


@pytest.fixture
def policy():
    return build(**SIZES)


def of_other_weights(seed=5, **options):
    return build(seed=seed, **SIZES | options)


def engine_of(policy, servers, folder, **options):
    return engine_at([each.url for each in servers], policy, folder, **{"away_s": 20.0} | options)


OWN = {}  # answers of our own engine, by the weights of its policy


def check_same(found, policy, asked=ASKED):
    weights = fingerprint(1, ((name, blob_of(weight)) for name, weight in policy.state_dict().items()))
    if weights not in OWN:
        OWN[weights] = answers(make_engine(policy.config, policy), ASKED)
    want = {request.key: OWN[weights][request.key] for request in asked}
    assert found.keys() == want.keys()
    for key, answer in want.items():
        assert found[key].tokens.tolist() == answer.tokens.tolist()
        np.testing.assert_allclose(found[key].logprobs, answer.logprobs, rtol=0, atol=1e-12)


def falsify(server, by=0.3):
    """Other numbers than those that the server says it has."""
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in server.policy.parameters():
            parameter += by * torch.randn(parameter.shape, generator=draw, dtype=parameter.dtype)


def test_answers_are_those_of_our_own_engine_while_servers_die_come_back_and_lie(policy, tmp_path, capsys):
    with contextlib.ExitStack() as stack:
        liar, honest = (stack.enter_context(served(of_other_weights(), tmp_path)) for _ in range(2))
        mortal = stack.enter_context(served(of_other_weights(), tmp_path))
        port = int(mortal.url.rpartition(":")[2])
        engine = stack.enter_context(engine_of(policy, [liar, honest, mortal], tmp_path))
        engine.load(policy.state_dict(), 1)
        until(lambda: {one.generation.version for one in (liar, honest, mortal)} == {1})
        falsify(liar)

        def fate(count):
            if count == 10:
                mortal.end()
            elif count == 20:  # with the weights that it began with
                stack.enter_context(served(of_other_weights(7), tmp_path, port=port))

        check_same(answers(engine, ASKED, on_answer=fate), policy)
        found = engine.metrics()
        assert found["dropped_servers"] == 1 and found["outages"] >= 1
        assert found["gap_0"] > 0.1 and found["gap_1"] < 1e-12
        said = capsys.readouterr().out
        assert f"policy.url={liar.url}: the log-probs of its answers differ" in said and "is dropped" in said


def test_a_server_that_lies_is_named_within_32_tokens(policy, tmp_path, capsys):
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(served(of_other_weights(), tmp_path)) for _ in range(2)]
        engine = stack.enter_context(engine_of(policy, servers, tmp_path))
        engine.load(policy.state_dict(), 1)
        until(lambda: servers[0].generation.version == servers[1].generation.version == 1)
        check_same(answers(engine, ASKED), policy)
        falsify(servers[1], 0.02)  # later, and by little: the other server is ten times as close
        check_same(answers(engine, ASKED), policy)
        (said,) = [line for line in capsys.readouterr().out.splitlines() if "log-probs" in line]
        assert servers[1].url in said and int(said.partition("answers of ")[2].split()[0]) < 32 + 12
        numbers = engine.metrics()
        count, tokens = (int(numbers[f"suspect_{what}"]) for what in ("answers", "tokens"))
        used = f"{count} of its answers to this worker, of {tokens} tokens, were used before (versions of weights: 1; "
        listed = (
            said.partition("conversations of the last one: ")[2].partition(")")[0].partition(" and ")[0].split(", ")
        )
        assert count > 0 and used in said and {*map(int, listed)} <= {request.episode for request in ASKED}
        falsify(servers[0])
        with pytest.raises(EmbodiedError, match=f"{servers[0].url}: the log-probs of its answers differ"):
            answers(engine, ASKED)


def test_requests_at_a_stopped_server_are_answered_by_other_servers(policy, tmp_path, monkeypatch):
    monkeypatch.setattr(server_pool, "WATCH_S", 0.1)
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(served(of_other_weights(), tmp_path)) for _ in range(2)]
        engine = stack.enter_context(engine_of(policy, servers, tmp_path))
        engine.load(policy.state_dict(), 1)
        until(lambda: servers[0].generation.version == servers[1].generation.version == 1)

        def stop(count):
            if count == 20:
                monkeypatch.setattr(servers[0].generation.engine, "step", lambda: time.sleep(0.01) or [])

        check_same(answers(engine, ASKED, on_answer=stop), policy)
        assert engine.metrics()["moved"] > 0
        until(lambda: not servers[0].generation.writing)
        engine.call(engine.pool.move_stragglers, engine.pool.servers[0])
        assert engine.metrics()["moved"] == 0 and not engine.pool.servers[0].is_refused


def test_a_run_says_once_that_its_server_is_paused_and_goes_on_when_it_is_resumed(policy, tmp_path, capsys):
    with served(of_other_weights(), tmp_path) as server, engine_of(policy, [server], tmp_path) as engine:
        engine.load(policy.state_dict(), 1)
        server.generation.pause("keep").result(60)
        said = []

        def resume():
            until(lambda: said.append(capsys.readouterr().out) or "is paused" in said[-1])
            engine.wait(engine.pool.report_waiting(engine.pool.servers[0]))
            server.generation.resume()

        with ThreadPoolExecutor(1) as thread:
            resumed = thread.submit(resume)
            check_same(answers(engine, ASKED), policy)
            resumed.result()
        said.append(capsys.readouterr().out)
        assert "".join(said).count(f"policy.url={server.url} is paused") == 1


def test_a_server_that_does_not_see_the_folder_is_sent_the_weights(policy, tmp_path, monkeypatch):
    monkeypatch.setattr(language_server.os.path, "isdir", lambda path: False)
    monkeypatch.setattr(published_weights, "BUCKET_BYTES", 100_000)
    with served(of_other_weights(), tmp_path) as server, engine_of(policy, [server], tmp_path) as engine:
        engine.load(policy.state_dict(), 1)
        check_same(answers(engine, ASKED), policy)
        assert server.generation.fingerprint == engine.name and not server.arriving.blobs
        monkeypatch.setattr(published_weights, "sums_of", lambda parts: tuple(1 for _ in parts))
        falsify(server)
        with pytest.raises(EmbodiedError, match=r"has not answered for 1 s.*was damaged on its way"):
            with engine_of(of_other_weights(8), [server], tmp_path, away_s=1.0) as other:
                other.load(of_other_weights(8).state_dict(), 1)
        assert server.generation.fingerprint == engine.name


def test_servers_that_are_not_there_yet_join_later(policy, tmp_path):
    with served(of_other_weights(), tmp_path) as first:
        with served(of_other_weights(), tmp_path) as gone:
            port = int(gone.url.rpartition(":")[2])
        with engine_of(policy, [first, gone], tmp_path) as engine:
            engine.load(policy.state_dict(), 1)
            check_same(answers(engine, ASKED), policy)
            with served(of_other_weights(), tmp_path, port=port) as late:
                until(lambda: late.generation.version == 1)
                check_same(answers(engine, ASKED[::-1]), policy)


def test_a_version_is_kept_until_every_server_has_read_it_or_left(tmp_path):
    folder = WeightFolder(tmp_path)
    tensors = {"a": torch.ones(3)}

    def publish(name):
        folder.write(name, tensors)
        folder.use(name)
        return folder.path / name

    first = publish("v1-a")
    with folder.reading() as at:
        assert at == first
        second = publish("v2-b")
        assert first.is_dir()
        with contextlib.suppress(EmbodiedError), folder.reading():
            third = publish("v3-c")
            raise EmbodiedError("this server has left")
        assert first.is_dir() and not second.exists()
    assert [*folder.path.iterdir()] == [third]
    folder.close()


def test_room_follows_throughput_and_stays_within_the_cache():
    assert request_limits({"a": 8, "b": 8}, {"a": 30.0, "b": None}) == {"a": 8, "b": 8}
    assert request_limits({"a": 8, "b": 8}, {"a": 30.0, "b": 10.0}) == {"a": 8, "b": 4}
    assert request_limits({"a": 8, "b": 8}, {"a": 1e6, "b": 0.0}) == {"a": 8, "b": 1}
    speed = WritingSpeed(4)
    for second in range(9):
        speed.count_answer(10, float(second), busy=True)
    assert speed.rate == 10.0
    for second in range(9, 200, 10):  # ten times as slow, as long as there is a queue
        speed.count_answer(10, float(second), busy=second < 100)
    assert 1.0 < speed.rate < 4.0


def test_a_gap_is_judged_by_the_last_tokens_and_beside_other_servers():
    gap = GapRecord()
    assert gap.limit(0.1, [], 1e-3) > 0.5  # a single token says little
    for _ in range(40):
        gap.add(np.array([1.0]))
    for _ in range(32):
        gap.add(np.array([1e-6, 3e-6]))
    assert gap.tokens == 32 and gap.mean == pytest.approx(2e-6) and gap.largest == 3e-6
    assert gap.limit(0.1, [], 1e-3) == 0.1
    assert gap.limit(0.1, [1e-6], 1e-3) == 1e-3 and gap.limit(0.1, [5e-3, 6e-3, 9.0], 1e-3) == pytest.approx(6e-2)


def draws_colder(server):
    """It draws at a temperature of its own, and tells the log-probs that it was asked for."""
    add = server.generation.engine.add
    colder = SamplingRule(0.5)
    server.generation.engine.add = lambda r: add(replace(r, sampling=replace(r.sampling, rule=colder)))


def proves_nothing(server):
    server.generation.engine.proofs = _Forgetful(server.generation.engine.proofs)


class _Forgetful(list):
    def __setitem__(self, row, writer):
        if writer:  # a proof was asked for
            writer.add = lambda state: None
        super().__setitem__(row, writer)


LIES = [(lambda server: falsify(server, 0.02), "is of other hidden states"), (draws_colder, "were not drawn as"),
        (proves_nothing, "is of other hidden states")]  # fmt: skip


@pytest.mark.parametrize(("lie", "reason"), LIES, ids=["weights", "sampler", "proof"])
def test_a_server_whose_answers_are_not_what_it_says_is_named_and_honest_ones_answer_all(lie, reason, tmp_path, capsys):
    policy = of_other_weights(0)
    with served(of_other_weights(), tmp_path) as liar, served(of_other_weights(), tmp_path) as honest:
        with engine_of(policy, [liar, honest], tmp_path, gap_limit=None, verify=1.0) as engine:
            engine.load(policy.state_dict(), 1)
            until(lambda: liar.generation.version == honest.generation.version == 1)
            check_same(answers(engine, ASKED[:16]), policy, ASKED[:16])
            assert engine.metrics()["dropped_servers"] == 0
            lie(liar)
            check_same(answers(engine, ASKED[:16]), policy, ASKED[:16])
        said = capsys.readouterr().out
        assert f"policy.url={liar.url}: " in said and reason in said and f"{honest.url}:" not in said


def test_only_the_share_that_is_asked_for_is_verified(tmp_path, monkeypatch):
    policy, verified = of_other_weights(0), []
    monkeypatch.setattr(http_engine, "check_proof", lambda *_, pooled: verified.append(pooled) or CheckedAnswer())
    draws = itertools.cycle([0.0, 0.25, 0.5, 0.99])
    secret = SimpleNamespace(SystemRandom=lambda: SimpleNamespace(random=lambda: next(draws)))
    monkeypatch.setattr(http_engine, "secrets", secret)
    with served(of_other_weights(), tmp_path) as server, engine_of(policy, [server], tmp_path, verify=0.25) as engine:
        engine.load(policy.state_dict(), 1)
        check_same(answers(engine, ASKED), policy)
        assert len(verified) == len(ASKED) // 4
        answers(engine, [Request(n, [5, 9, 7], 3, episode=n) for n in range(100, 108)])
    assert verified[len(ASKED) // 4 :] == [True, False]  # the second answer to a prompt is checked alone


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_server_is_dropped_for_what_its_answers_show_together_with_proofs_and_without(is_ours, tmp_path, monkeypatch):
    """Each proof alone is within its limits, and gaps are not compared."""
    monkeypatch.setitem(LIMITS, torch.float64, replace(LIMITS[torch.float64], proof=1.0, drawn=1.0))
    monkeypatch.setattr(RemoteServer, "is_ours", is_ours)
    policy = of_other_weights()
    with served(of_other_weights(), tmp_path) as server:
        with engine_of(policy, [server], None, gap_limit=None, verify=1.0) as engine:
            engine.load(policy.state_dict(), 1)
            check_same(answers(engine, ASKED), policy)
            falsify(server, 1e-6)
            others = [Request(n, [5 + n // 40, 9, 7 + n % 40], 12, episode=100 + n) for n in range(80)]
            with pytest.raises(
                EmbodiedError, match=f"{server.url}: its last answers, of .* that were checked together"
            ):
                answers(engine, others)
