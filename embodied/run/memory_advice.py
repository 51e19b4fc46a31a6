"""Advice for a run that does not fit into memory: the options that help most. Imported only then."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import ceil, inf
from typing import Any

from embodied.config.recipe import RunConfig
from embodied.core.options import written
from embodied.placement import PlacementPlan, Topology
from embodied.run.memory_check import measured_memory, needs, vllm_cache

LORA_RANK = 32  # of the adapters in advice


def saving_options(config: RunConfig, plan: PlacementPlan, machines: Topology) -> str:
    """Options with which the plan fits, the most helpful first; "" if all of them save too little. Options that change
    no result come first, a language model's precision and adapters last; KV caches are as large as fits."""
    policy, exact = config.policy, {"checkpoint_activations": True, "reduce_each_pass": True}
    alike: list[tuple[str, dict[str, Any]]] = [("learner", {"shard": plan.count("learner") > 1})]
    alike += [("learner", {key: value}) for key, value in exact.items()]
    alike += [] if policy.speaks else [("learner", {"micro_batch_size": 1})]
    adapters = {"lora_rank": getattr(policy, "lora_rank", None) or LORA_RANK, "train_layers": None}
    others = [("policy", {"dtype": "bfloat16"}), ("policy", adapters)] if policy.speaks else []
    chosen: list[tuple[str, dict[str, Any]]] = []

    def excess(options: Iterable[tuple[str, dict[str, Any]]]) -> float:
        """Bytes that are too many with these options and the smallest cache; infinite if they do not go together."""
        changed = with_options(config, options)
        *_, changed = changed, *smaller_caches(changed, plan)
        return inf if is_refused(changed) else sum(need.excess for need in needs(changed, plan, machines))

    for kind in (alike, others):
        while kind and excess(chosen):
            best = min(kind, key=lambda option: excess([*chosen, option]))
            if excess([*chosen, best]) >= excess(chosen):
                break
            chosen.append(best)
            kind.remove(best)
    if excess(chosen):
        return ""
    for option in chosen[::-1]:  # a later option may have made an earlier one needless
        without = [other for other in chosen if other is not option]
        chosen = chosen if excess(without) else without
    whole = with_options(config, chosen)
    caches = [whole, *smaller_caches(whole, plan)]
    changed = next(each for each in caches if not any(need.excess for need in needs(each, plan, machines)))
    order = [f"{section}.{key}" for section, values in chosen for key in values]
    words = [(word.partition("=")[0], word) for word in differences(config, changed)]
    return " ".join(word for _, word in sorted(words, key=lambda one: [*order, one[0]].index(one[0])))


def with_options(config: RunConfig, options: Iterable[tuple[str, dict[str, Any]]]) -> RunConfig:
    for section, values in options:
        config = config.with_values(section, **values)
    return config


def is_refused(config: RunConfig) -> bool:
    """True if these options do not go together."""
    try:
        type(config).model_validate(dict(config))
        type(config.learner).model_validate(dict(config.learner))
    except ValueError:
        return True
    return False


def smaller_caches(config: RunConfig, plan: PlacementPlan) -> Iterator[RunConfig]:
    """With smaller KV caches of vLLM, the largest first: whole gigabytes, down to one conversation."""
    memory = measured_memory(config, plan.count("learner"))
    least = memory.acting / 1e9 if memory else 1
    given = vllm_cache(config) / 1e9
    for cache in range(ceil(given) - 1, 0, -1):
        if cache >= least:
            yield config.with_values("policy", cache_gb=float(cache))


def differences(before: RunConfig, after: RunConfig) -> list[str]:
    return [
        f"{section}.{key}={written(value)}"
        for section in ("policy", "learner")
        for key, value in getattr(after, section)
        if value != getattr(getattr(before, section), key)
    ]
