"""Let vLLM answer, in processes of their own since it keeps threads and process groups; prints what it wrote as JSON,
a line for each kind of model that its arguments name, after one of the heads that vLLM runs on a CPU. All fork from one
that has imported vLLM.

`gaps`: the largest distance of its log-probs from the model's own, after each of three loads. `slept`: what it has
while it sleeps at level 2 and while it wakes up, and what it writes afterwards.
"""

import json
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import tiny_language
import tiny_sight
import torch
from language_models import STOP, answers, drained, engine_of, logprobs_by_the_model, question, qwen3, qwen3_moe

from embodied.core.pictures import drawing
from embodied.core.types import SamplingRule
from embodied.policies.language.engine import Sampling, make_engine
from embodied.policies.language.vllm import SETTINGS, memory_of

MODELS = {"tied": lambda: qwen3(tied=True), "untied": qwen3, "divided": qwen3, "experts": qwen3_moe}
LONGER_THAN_A_BLOCK = [5, 6] * 70  # what vLLM remembers of prompts is in blocks of 128 tokens
ASKED = [question(i, [*LONGER_THAN_A_BLOCK, i], max_tokens=12) for i in range(10)]


def weights_of(model):
    tied = model.config.tie_word_embeddings
    return {name: tensor for name, tensor in model.state_dict().items() if not (tied and name == "lm_head.weight")}


def gap(engine, model, **rule):
    found, at = answers(engine, ASKED, **rule), engine.config.temperature
    return max(
        float(np.abs(found[r.key].logprobs - logprobs_by_the_model(model, r, found[r.key], at)).max()) for r in ASKED
    )


def train(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)


def answered(found):
    return {key: [a.tokens.tolist(), a.truncated, a.dropped, len(a.logprobs)] for key, a in sorted(found.items())}


def slept(engine, model):
    """Sends it to sleep, and wakes it up."""
    said = {"awake": held(engine), "num_bytes": engine.num_bytes(), "freed": engine.offload(), "asleep": held(engine)}
    refused = [of_refusal(lambda: engine.begin(1, 0, "train", SamplingRule()))]
    refused.append(of_refusal(lambda: engine.load(weights_of(model), 1)))
    said["taken"] = engine.onload()
    said["for_weights"] = held(engine)
    refused.append(of_refusal(lambda: engine.begin(1, 0, "train", SamplingRule())))
    engine.load(weights_of(model), 1)
    return said | {"refused": refused, "loaded": held(engine), "again": answered(answers(engine, ASKED))}


def held(engine):
    """Bytes of weights and of the cache that it holds, and how many layers have weights packed for the CPU."""
    return [sum(each) for each in zip(*engine.engine.collective_rpc(held_by), strict=True)]


def held_by(worker):
    parts = [[tensor.untyped_storage() for tensor in part] for part in memory_of(worker).values()]
    storages = [{storage._cdata: storage.nbytes() for storage in part} for part in parts]
    packed = [layer for layer in worker.model_runner.get_model().modules() if getattr(layer, "cpu_linear", None)]
    return [*(sum(part.values()) for part in storages), len(packed)]


def of_refusal(use):
    try:
        use()
    except AssertionError as err:
        return str(err)


def main(kind):
    torch.manual_seed(0)
    model = MODELS[kind]()
    divided = {"tensor_parallel": 2} if kind == "divided" else {}
    usual = 0.8 if kind == "untied" else 1.0
    engine = engine_of(model, engine="vllm", max_running=4, max_length=256, temperature=usual, **divided)
    said = {"gaps": []}
    for rule in ({}, {"temperature": 0.7}, {"top_k": 9, "top_p": 0.8}):
        engine.load(weights_of(model), 1)
        said["gaps"].append(gap(engine, model, **{"temperature": usual} | rule))
        train(model)
    engine.load(weights_of(model), 1)
    said["greedy"] = answered(answers(engine, ASKED, temperature=0))
    said["greedy_of_ours"] = answered(answers(engine_of(model, max_length=256), ASKED, temperature=0))
    said["first"] = answered(answers(engine, ASKED))
    said["slept"] = slept(engine, model)
    if kind == "untied":
        said |= drawn(engine, model)
    engine.close()
    print(json.dumps(said | {"stop": STOP}))


def seen(kind, folder):
    """Of a model that sees, at temperature 0.7 and after each of two loads: how far log-probs of answers to pictures
    are from the learner's, and from those that it has where other pictures are shown."""
    torch.manual_seed(0)
    tiny_sight.publish(Path(folder), kind, dim=32)
    policy = tiny_language.build(tiny_language.SEES, pretrained=folder, max_length=256, max_running=4, temperature=0.7)
    engine = make_engine(policy.config.model_copy(update={"engine": "vllm"}), policy)
    pictures = [drawing("count", seed, 48) for seed in range(3)]
    others = dict(zip(pictures, [*pictures[1:], pictures[0]], strict=True))
    asked, said = [], {"seen": []}
    for number in range(6):
        shown = (pictures[number % 3], pictures[0])[: 1 + number % 2]
        parts = [*({"type": "image", "image": name} for name in shown), {"type": "text", "text": "sum: "}]
        tokens = policy.tokenizer.encode(({"role": "user", "content": parts},), first=True)
        asked.append(replace(question(number, tokens, 8), pictures=shown))
    for _ in range(2):
        engine.load(policy.model_weights(), 1)
        found = answers(engine, asked, 0.7)
        distances = [
            [np.abs(found[one.key].logprobs - scored(policy, one, found[one.key], names)).max() for names in both]
            for one in asked
            for both in [(one.pictures, [others[name] for name in one.pictures])]
        ]
        said["seen"].append(np.max(distances, axis=0).tolist())
        train(policy)
    engine.close()
    print(json.dumps(said))


def scored(policy, request, answer, pictures):
    """The learner's log-probs of an answer to a prompt that shows these pictures."""
    tokens = np.array([*request.tokens, *answer.tokens])
    mask = np.arange(len(tokens)) >= len(request.tokens)
    inputs = {"actions": tokens[:, None, None], "mask": mask[:, None], "lengths": np.array([len(tokens)])}
    with torch.no_grad():
        scores = policy(inputs | {"groups": np.zeros(1), "pictures": [*pictures]})
    return scores.logprobs.ravel().numpy()[mask]


def least_share(engine, model, min_p):
    """The smallest probability of a drawn token, as a share of the likeliest token's."""
    found = answers(engine, ASKED, min_p=min_p)
    least = []
    for request in ASKED:
        ids = torch.tensor([[*request.tokens, *map(int, found[request.key].tokens)]])
        with torch.no_grad():
            likely = model(ids).logits[0, len(request.tokens) - 1 : -1].softmax(-1)
        drawn = likely.gather(1, ids[0, len(request.tokens) :, None])[:, 0]
        least.append(float((drawn / likely.amax(-1)).min()))
    return min(least)


def drawn(engine, model):
    """What does not depend on the model: rules of sampling, ends of answers, and weights that make no numbers."""
    said = {
        "narrow": [answered(answers(engine, ASKED, **rule)) for rule in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0})]
    }
    said["shares"] = [least_share(engine, model, min_p) for min_p in (0.0, 0.3)]
    greedy = Sampling(0, "act/eval", SamplingRule(0.0), frozenset({STOP}))
    beside = [replace(one, sampling=greedy if place % 2 else None) for place, one in enumerate(ASKED)]
    engine.begin(1, 0, "train", SamplingRule())
    said["beside"] = answered(drained(engine, beside))
    said["again"] = answered(answers(engine, ASKED))
    said["full"] = answered(answers(engine, [question(0, [5] * 250), question(1, [5] * 256)], temperature=0))
    engine.begin(1, 0, "train", SamplingRule())
    for number in range(4):
        engine.add(question(number, [5, 6, 7], 100))
    said["room"] = engine.room
    for _ in range(3):
        engine.step()
    said["aborted"] = answered({answer.key: answer for answer in engine.abort()})
    said["left"] = engine.running
    broken = dict(weights_of(model))
    name = "model.embed_tokens.weight"
    broken[name] = broken[name].clone()
    broken[name][40] = float("nan")
    engine.load(broken, 1)
    engine.begin(1, 0, "train", SamplingRule())
    asked = [question(0, [5, 40, 6]), *(question(i, [5, 6, i], 5) for i in range(1, 4))]
    return said | {"broken": answered(drained(engine, asked))}


if __name__ == "__main__":
    os.environ.update(SETTINGS)
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    print(json.dumps({"heads": CPUAttentionBackend.get_supported_head_sizes()}), flush=True)
    for kind in sys.argv[1:]:
        if (child := os.fork()) == 0:
            if kind in MODELS:
                main(kind)
            else:
                with tempfile.TemporaryDirectory() as folder:
                    seen(kind, folder)
            sys.stdout.flush()
            os._exit(0)  # whatever vLLM has left
        if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            sys.exit(code if code > 0 else 1)
