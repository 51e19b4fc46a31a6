"""policy.compile: acting through torch.compile decides as without it, and what is saved does not depend on it."""

import json
import shutil

import numpy as np
import pytest
import torch
from tiny_vla import TEXTS, build, noise, observe, scored

from embodied.config.recipe import load
from embodied.core.errors import ConfigError
from embodied.policies.vla import policy as vla_policy
from embodied.run.policy_source import differing

LORA = {"lora_rank": 2}
CASES = {
    "openvla": {"name": "openvla", "camera": "top"},
    "adapters": {"name": "openvla", "camera": "top"} | LORA,
    "oft": {"name": "openvla_oft", "chunk": 2, "head": "l1", "proprio": True, "film": True},
    "pi0": {"name": "pi0"},
    "pi05": {"name": "pi05"} | LORA,
}

# torch's compiler imports parts of torch that are deprecated
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_compiled_networks_decide_as_others_do(case):
    plain, fused = build(**CASES[case]), build(**CASES[case], compile=True)
    fused.load_weights(plain.state_dict())
    for rows, texts in ((4, TEXTS[:1]), (2, TEXTS), (4, TEXTS)):  # with and without padding; memory is used again
        obs, draws = observe(rows, texts=texts), noise(plain, rows, seed=rows)
        one, two = plain.act(obs, draws), fused.act(obs, draws)
        for name in ("actions", "logprobs", "values"):
            np.testing.assert_allclose(getattr(one, name), getattr(two, name), atol=1e-4, err_msg=name)
        scores = scored(fused, obs, two)
        np.testing.assert_allclose(scores.logprobs.detach().numpy(), two.logprobs, atol=1e-4)


@pytest.mark.slow
def test_compiled_networks_take_new_weights():
    policy, obs, draws = build(**CASES["openvla"], compile=True), observe(2), np.full((2, 3), 0.4)
    before = policy.act(obs, draws).values
    policy.use_weights({n: 2 * w if n.startswith("value_head.") else w for n, w in policy.state_dict().items()})
    after = policy.act(obs, draws).values
    assert not np.allclose(before, after)
    np.testing.assert_allclose(policy.value(obs), after, atol=1e-5)


def test_without_a_compiler_it_says_what_to_do(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match=r"install g\+\+ .*policy.compile=false"):
        vla_policy.compiled(len)


def test_a_program_that_a_killed_process_left_unfinished_is_compiled_again(monkeypatch, tmp_path):
    library = tmp_path / "program.so"
    library.touch()

    def run(x):
        if library.exists():
            raise RuntimeError(f"InductorError: ImportError: {library}: file too short")
        return x

    monkeypatch.setattr(torch, "compile", lambda function, options: run)
    assert vla_policy.compiled(run)(x=3) == 3


def test_a_saved_policy_does_not_keep_the_option_compile(tmp_path):
    fused = build("pi0", compile=True)
    fused.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["policy"]["compile"] is False
    here = load(["recipe=pointmass_ppo_pi0_tiny", "policy.compile=true"]).config.policy
    assert not differing("policy", here.model_copy(update={"compile": False}), here)
