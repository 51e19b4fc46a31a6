"""Where a policy comes from: every form of `checkpoint=`, the start of a run, and the run to resume.

A policy is its options, the env it was made for, and its weights as arrays; nothing here imports torch. The start of a
run may be a recipe: then it is the policy of that recipe's finished run, or of the run that is made first.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from glob import escape
from operator import getitem
from pathlib import Path
from shlex import join
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from embodied.config.command_line import COMMANDS, is_class, is_server, stored_recipe
from embodied.config.read import Command, is_one_of
from embodied.config.recipe import Loaded, RunConfig, commands_of_recipe, load
from embodied.config.recipe_files import recipe_names
from embodied.core.arrays import flat_dict
from embodied.core.errors import CheckpointError, ConfigError, naming, nearest
from embodied.core.files import digest
from embodied.core.yaml_text import read_yaml, write_yaml
from embodied.envs import env_class
from embodied.policies.config import ANSWERING, OF_SERVER, ONNX, PLAYING, TEMPLATE, RemoteConfig
from embodied.policies.hub import check_model, fetch, is_hub_id
from embodied.policies.language.config import LanguageConfig
from embodied.policies.policy_folder import read_json
from embodied.run.run_folder import locate, name_of

if TYPE_CHECKING:
    from embodied.core.types import EnvSpec
    from embodied.policies.base import Policy
    from embodied.runtime.published_weights import Weights

CLASS = re.compile(r"[\w.]+:\w+")
BUILT_IN = {"random": "embodied.policies.networks:RandomPolicy", "zero": "embodied.policies.networks:ZeroPolicy"}
FROM = "exported_from"  # in an exported folder's config.json: the policy that it was
HOW = "policy.compile"  # an option of acting, not of the policy
SERVER = ("engine", *OF_SERVER)  # options of the engine
ANSWERS = (*SERVER, *TEMPLATE, "max_tokens", "max_length", "max_running", "cache_gb", "train_layers")  # of generation
LEARNS = ("dtype", "detach_value", "expert_bias_rate", "keyframes", "noise_level", "train", "value_head")
FREE = tuple(f"policy.{key}" for key in (*LEARNS, *ANSWERS))  # options that may differ from the start's
ORIGIN = ("policy.pretrained", "policy.statistics")  # a saved policy contains what these keys name
KEPT = ("env.name", "env.task", "env.num_envs", "algo.name", *ORIGIN)  # a resumed run keeps these and its policy
UNSEEN = (
    *("num_envs", "stagger", "retries", "backend", "on_success", "max_episode_steps", "reward", "reward_kwargs"),
    *("fast_images", "video_size"),
)
# env options that may differ between training and evaluation
UNLIKE = ("num_envs", "side_by_side", "task", "stagger", "retries")


@dataclass(frozen=True)
class PolicySource:
    """One policy to evaluate."""

    name: str  # in tables, and of its folder
    config: Any  # of the policy
    spec: EnvSpec | None = None  # the env it was made for; None: it takes any
    weights: Weights | None = None  # None: a run's initial weights
    folder: Path | None = None  # of the policy
    out: Path | None = None  # folder of its results if it is the only policy; None: in `run.dir`
    about: dict[str, Any] = field(default_factory=dict)  # further facts for results.json

    @property
    def published(self) -> bool:
        return self.folder is not None and self.spec is None

    def weights_for(self, spec: EnvSpec) -> Weights | None:
        return weights_of(self.config, spec) if self.published else self.weights

    def described(self) -> dict[str, Any]:
        """The policy's entry in results.json; of sharded weights the index file is hashed."""
        facts = {"name": self.name, "family": self.config.name, "folder": self.folder and str(self.folder)} | self.about
        if self.folder is None:
            return {**facts, "sha256": None}
        files = [self.folder / name for name in ("model.safetensors", ONNX, "model.safetensors.index.json")]
        return {**facts, "sha256": digest(next(filter(Path.is_file, files), files[-1]))}


def find_all(loaded: Loaded) -> list[PolicySource]:
    """All policies to evaluate, with unique names."""
    checkpoints = loaded.checkpoints
    sources: list[PolicySource] = []
    for checkpoint in checkpoints:
        with naming("checkpoint"):
            policy = find(checkpoint, loaded)
        taken_names = {source.name for source in sources}
        names = [policy.name, *(f"{policy.name}-{number}" for number in range(2, len(checkpoints) + 1))]
        sources.append(
            PolicySource(**{**vars(policy), "name": next(name for name in names if name not in taken_names)})
        )
    asked = loaded.config.policy.name
    if "policy.name" in loaded.asked and asked not in [source.config.name for source in sources]:
        raise ConfigError(
            f"policy.name={asked} has no effect: {sources[0].name} is a {sources[0].config.name}; leave it out"
        )
    return sources


def find(checkpoint: str, loaded: Loaded | None = None, trusted: str | None = None) -> PolicySource:
    """The policy of one `checkpoint=`. `loaded`: the recipe, for published models and the user's own classes.
    `trusted`: a class that the user named separately."""
    from embodied.policies.policy_folder import check_files, published_family, read_blobs, read_description
    from embodied.runtime.published_weights import Weights

    if is_server(checkpoint):
        return find_server(checkpoint, loaded)
    if checkpoint in BUILT_IN or is_class(checkpoint):
        return find_class(checkpoint, loaded)
    on_hub = is_hub_id(checkpoint)
    policy, saved, run = (fetch(checkpoint), None, None) if on_hub else locate(checkpoint)
    if saved is None:
        check_files(policy)
    name = checkpoint.replace("/", "-") if on_hub else (saved or policy).resolve().name
    if loaded and published_family(policy):
        return PolicySource(name, policy_of(policy, loaded), folder=policy)
    config, spec = read_description(policy)
    if ":" in config.name:
        named = [trusted, loaded.config.policy.name if loaded and "policy.name" in loaded.sources else None]
        check_named(checkpoint, config.name, named if on_hub else [*named, trained_class(policy)])
    config = answering(playing(config, loaded), loaded)
    config.check_sizes(policy)
    version = read_json(saved / "manifest.json")["version"] if saved else 0
    name = f"{run.resolve().name}-{name_of(version)}" if run else name
    out = (run or policy.parent) / "eval" / (f"{name_of(version)}-evaluate" if saved else policy.name)
    weights = Weights(version, read_blobs(policy)) if config.sends_weights else None
    about = {} if config.sends_weights else {FROM: read_json(policy / "config.json").get(FROM)}
    return PolicySource(name, config, spec, weights, policy, None if on_hub else out, about)


def load_policy(policy: Any, name: str | None = None) -> Policy:
    """The policy of a run (its newest checkpoint), of a checkpoint or of a policy folder, ready for `act_on`.

    `policy` is a folder or what `embodied.train` returned. A class of yours in a folder outside its run needs its
    `name`, such as my_nets:Linear.
    """
    from embodied import policies

    source = find(str(getattr(policy, "folder", policy)), trusted=name)
    if source.folder is None:
        raise ConfigError(f"{policy} has no weights to load; name a run or a policy folder")
    return policies.load_policy(source.folder, source.config.name).eval()


def policy_of_checkpoint(checkpoint: Path) -> PolicySource:
    """The policy of a run's checkpoint, without its weights."""
    from embodied.policies.policy_folder import read_description

    return PolicySource(str(checkpoint), *read_description(checkpoint / "policy"))


def check_named(checkpoint: str, name: str, named: list[str | None]) -> None:
    """Refuse a policy folder if only its config.json, and not the user, names the class to import."""
    if name not in named:
        raise ConfigError(
            f"checkpoint={checkpoint}: its config.json names {name}, and a folder never decides alone which "
            f"code runs; if this class is yours, add policy.name={name}"
        )


def trained_class(policy: Path) -> str | None:
    """`policy.name` in the config.yaml of the run that contains a policy folder; None outside a run."""
    recipe = stored_recipe(policy)
    return (resolved_recipe(recipe.parent).get("policy") or {}).get("name") if recipe else None


def answering(config: Any, loaded: Loaded | None) -> Any:
    """The policy's options, with the command line's options of engine and generation."""
    if loaded is None or not (asked := [key for key in ANSWERING if key in loaded.asked]):
        return config
    if not config.speaks:
        raise ConfigError(f"{asked[0]} has no effect: only a language model has an engine; leave it out")
    options = {key: value for key, value in config if key not in SERVER or "policy.engine" not in asked}
    return LanguageConfig.model_validate(options | policy_options(loaded, asked))


def playing(config: Any, loaded: Loaded | None) -> Any:
    """The policy's options, with the command line's options of how its actions are computed and played."""
    asked = [key for key in PLAYING if any(is_one_of(asked_key, [key]) for asked_key in loaded.asked)] if loaded else []
    return with_playing(config, policy_options(loaded, asked) if asked else {})


def policy_options(loaded: Any, keys: Sequence[str]) -> dict[str, Any]:
    return {key: getattr(loaded.config.policy, key) for key in (name.removeprefix("policy.") for name in keys)}


def with_playing(config: Any, changed: dict[str, Any]) -> Any:
    """The policy's options with these options of how its actions are computed and played."""
    from embodied.policies.policy_folder import validated

    for key, value in changed.items():
        fixed = key == "chunk" and not hasattr(config, "horizon")
        if fixed or not hasattr(config, key):
            raise ConfigError(
                f"policy.{key}={value} has no effect: this {config.name} was trained with "
                + (f"policy.chunk={getattr(config, key, 1)}" if key == "chunk" else f"no policy.{key}")
                + "; leave it out"
            )
    try:
        return validated(type(config), dict(config) | changed, "policy.") if changed else config
    except ValueError as err:
        raise ConfigError(str(err)) from None


def find_class(checkpoint: str, loaded: Loaded | None) -> PolicySource:
    """A policy without weights: built in, or the user's class with options from the recipe or the command line."""
    from embodied.policies import check_package
    from embodied.policies.config import ExternalPolicyConfig

    if checkpoint in BUILT_IN:
        return PolicySource(checkpoint, ExternalPolicyConfig(name=BUILT_IN[checkpoint]))
    if not CLASS.fullmatch(checkpoint):
        raise ConfigError(f"checkpoint={checkpoint}: there is no such folder, and a class is my_pkg.my_module:MyPolicy")
    config = loaded.config.policy if loaded else None
    if config is None or config.name != checkpoint:
        config = ExternalPolicyConfig(name=checkpoint)
    check_package(checkpoint, "checkpoint")
    return PolicySource(checkpoint.rpartition(":")[2], config)


def find_server(url: str, loaded: Loaded | None) -> PolicySource:
    """A server that acts; raises EmbodiedError unless it answers."""
    from embodied.policies.remote.client import first_look

    config = loaded.config.policy if loaded and loaded.config.policy.name == "remote" else RemoteConfig(url=url)
    config = config.model_copy(update={"url": url})
    about = first_look(config)
    if loaded and (loaded.config.eval.delay or config.chunks):
        config = config.model_copy(update={"chunk_length": about.get("action_chunk", 1)})
    name = re.sub(r"[^\w.-]+", "-", urlsplit(url).netloc.rpartition("@")[2] + urlsplit(url).path).strip("-")
    return PolicySource(name, config, about={"server": about})


def find_start(start: Path, policy: Any) -> PolicySource:
    """The policy of `run.start_from`. Raises ConfigError if its options differ from this run's policy."""
    with naming("run.start_from"):
        source = find(str(start), trusted=policy.name)
    check_same_policy(f"run.start_from={start}", source.config, policy)
    return source


def check_same_policy(start: str, trained: Any, here: Any) -> None:
    """Refuse to start from the weights of another policy."""
    if trained.acts_best:
        raise ConfigError(f"{start} is an exported program, which only acts; name the run that it comes from")
    if trained.name != here.name:
        raise ConfigError(f"{start} is policy.name={trained.name}, here it is {here.name}; set it to the same")
    from_folders = all(policy.published and policy.pretrained is not None for policy in (trained, here))
    free = (*FREE, "policy.pretrained") if from_folders else FREE
    if odd := [line for line in differing("policy", trained, here) if line.partition("=")[0] not in free]:
        raise ConfigError(f"{start} is another policy: {'; '.join(odd)}; set these keys to the same values")


def check_continues(run: Path, checkpoint: Path | None, config: RunConfig) -> None:
    """A resumed run must keep its policy, env rows and algorithm, since a checkpoint holds their state."""
    trained = find(str(checkpoint), trusted=config.policy.name).config if checkpoint else config.policy
    free = (*ORIGIN, *(f"policy.{key}" for key in SERVER))
    odd = [line for line in differing("policy", trained, config.policy) if line.partition("=")[0] not in free]
    if trained.name != config.policy.name:
        odd = [f"policy.name={trained.name} there, {config.policy.name} here"]
    then, now = resolved_recipe(run), config.model_dump(mode="json")
    for section, key in (name.split(".") for name in KEPT):
        here = now[section].get(key)
        before = (then.get(section) or {}).get(key, here)
        if before != here:
            odd.append(f"{section}.{key}={write_yaml(before)} there, {write_yaml(here)} here")
    if odd:
        raise ConfigError(
            f"{run} cannot continue with other settings: {'; '.join(odd)}; leave these keys out, or begin a new "
            f"run with run.start_from={run} if the policy is the same"
        )


def resolved_recipe(run: Path) -> dict[str, Any]:
    """The resolved recipe of a run; {} if none is stored."""
    file = run / "config.yaml"
    return (read_yaml(file.read_text(encoding="utf-8")) if file.is_file() else None) or {}


def differing(section: str, trained: Any, here: Any) -> list[str]:
    """`policy.hidden=[64, 64] there, [8, 8] here` for every option that differs between two configs."""
    ours, two = trained.model_dump(mode="json"), here.model_dump(mode="json")
    return [
        f"{section}.{key}={write_yaml(ours.get(key))} there, {write_yaml(two.get(key))} here"
        for key in sorted(ours.keys() | two.keys())
        if ours.get(key) != two.get(key) and f"{section}.{key}" != HOW
    ]


def check_fits(source: PolicySource, env: Any, spec: EnvSpec) -> None:
    """Refuse a policy made for other observations or actions than this env's."""
    made = source.spec
    if made is None:
        return
    offered = {camera: spec.images.get(camera) for camera in made.images}  # unused cameras do not matter
    words = {
        "actions": (made.action, spec.action),
        "state": (made.state_dim, spec.state_dim if made.state_dim else None),
        "privileged numbers": (made.privileged_dim, spec.privileged_dim if made.privileged_dim else None),
        "images": (made.images, offered),
        "instruction": (made.instruction, made.instruction and spec.instruction),
    }
    if wrong := [
        f"{what} {stored} there, {theirs} here" for what, (stored, theirs) in words.items() if stored != theirs
    ]:
        raise ConfigError(f"{source.name} was made for another env than {env.name} {env.task}: {'; '.join(wrong)}")


def trained_in(source: PolicySource, env: Any) -> bool:
    """True if this policy's run had an env with the observations and actions of `env`."""
    recipe = source.folder and stored_recipe(source.folder)
    return same_env(env_stored_in(recipe) if recipe else {}, env)


def same_env(then: dict[str, Any], env: Any) -> bool:
    """True if these stored options make the observations and actions of `env`."""
    now = env.model_dump(mode="json")
    return all(then.get(key) == now.get(key) for key in then.keys() | now.keys() if key not in UNSEEN)


def of_another_env(source: PolicySource, env: Any) -> bool:
    """True if the run of this policy had another `env.name`."""
    recipe = source.folder and stored_recipe(source.folder)
    return bool(recipe) and env_stored_in(recipe).get("name") != env.name


def env_stored_in(recipe: Path) -> dict[str, Any]:
    """The env options of a run's config.yaml."""
    return resolved_recipe(recipe.parent).get("env") or {}


def other_training(source: PolicySource, loaded: Loaded, fixed: dict[str, Any]) -> str:
    """Says how the env of the policy's training differs from the env of its evaluation. Options on the command line are
    skipped."""
    recipe = source.folder and stored_recipe(source.folder)
    if not recipe:
        return ""
    trained = env_stored_in(recipe)
    now = loaded.config.env.model_dump(mode="json")
    if trained.get("name") != now["name"]:
        return f"{source.name} was trained with env.name={trained.get('name')} env.task={trained.get('task')}"
    odd = [
        f"env.{key}={trained.get(key)!r} (now {now.get(key)!r})"
        for key in sorted(trained.keys() | now.keys())
        if key not in (*UNLIKE, *fixed) and f"env.{key}" not in loaded.asked and trained.get(key) != now.get(key)
    ]
    return f"{source.name} was trained with {', '.join(odd)}" if odd else ""


# Published models, evaluated without a run of ours. The recipe `<env>_published_<family>` holds their protocol. Options
# that depend on the folder (its statistics, its components) are chosen here. All options are printed as keys that the
# command line can set.


def policy_of(folder: Path, loaded: Loaded) -> Any:
    """The recipe's policy with this folder's weights, and options decided by the folder and the task."""
    from embodied.policies import policy_class
    from embodied.policies.policy_folder import published_family

    config = loaded.config.policy
    if not config.published:
        family = published_family(folder)
        raise ConfigError(f"{folder} holds a published {family} model; name a recipe for it, with policy.name={family}")
    check_model(folder, config, key="checkpoint")
    config = config.model_copy(update={"pretrained": str(folder)})
    chosen = policy_class(config.name).choices(config, env_class(loaded.config.env).tasks(loaded.config.env)[0])
    config = config.model_copy(update={key: chosen[key] for key in chosen if f"policy.{key}" not in loaded.asked})
    config.check_sizes(folder)
    return config


def published_spec(config: Any, env: Any) -> EnvSpec:
    """Observations and actions of a published model, derived from recipe and folder without a simulator."""
    from embodied.core.types import ActionSpec, EnvSpec
    from embodied.policies import policy_class

    written, felt = policy_class(config.name).numbers(config)
    shape = (env.image_size, env.image_size, 3)
    return EnvSpec(ActionSpec(written), state_dim=felt, images=dict.fromkeys(config.cameras, shape), instruction=True)


def weights_of(config: Any, spec: EnvSpec) -> Weights:
    """Weights of the folder, with the order and names of the policy for this env."""
    from embodied.policies import make_policy
    from embodied.runtime.published_weights import Weights

    return Weights(0, make_policy(config, spec).stored_weights())


def describe_published(config: Any, env: Any) -> str:
    """Lines for the first screen: the model's options and the env's."""
    options = changed_options("policy", config, "name", "pretrained") + changed_options(
        "env", env, "name", "task", "num_envs"
    )
    return "\n            ".join([f"as {config.name} models are published, from {config.pretrained}:", *options])


def changed_options(section: str, config: Any, *but: str) -> list[str]:
    """The options that differ from their default, as arguments."""
    usual = {key: field.get_default(call_default_factory=True) for key, field in type(config).model_fields.items()}
    odd = {key: value for key, value in config if value != usual[key] and key not in but}
    return [f"{section}.{key}={write_yaml(value)}" for key, value in odd.items()]


# The command line's values of these also hold for the first run.
ALSO = ("seed", "run.dir", "env", "policy", "learner", "placement", "cluster", "eval", "faults")
# Keys that must agree for an existing run to be the wanted one, besides task and policy
DECIDES = ("seed", "algo", "sft", "collect", "run.env_steps", "run.iterations")
WHERE = ("data", "cache")  # options of sft: paths
# Options of an env that do not change a policy's observations and actions
ASIDE = ("num_envs", "stagger", "retries", "modules", "fast_images", "video_size")


@dataclass(frozen=True)
class FirstRun:
    """A run that trains the initial policy of another run."""

    recipe: str
    command: str  # train or sft
    arguments: tuple[str, ...]
    loaded: Loaded
    folder: Path | None = None  # of the finished run; None: not trained yet
    trained_otherwise: tuple[Path, str] | None = None  # a finished run of the same policy, and an option it differs in

    def describe(self) -> str:
        """A line that names the run that the start comes from, or the command that trains it first."""
        if self.folder:
            return f"start       {self.folder}, a run of recipe {self.recipe}"
        missing = f"no finished run of recipe {self.recipe} with this policy in {self.loaded.config.run.dir}"
        if self.trained_otherwise:
            run, key = self.trained_otherwise
            missing = f"{run} had another {key} (to start from it all the same: run.start_from={run})"
        return f"start       {missing}: first\n            python -m embodied.{self.command} {join(self.arguments)}"


def first_run(loaded: Loaded, before: tuple[str, ...] = ()) -> FirstRun | None:
    """The first run of a recipe whose `run.start_from` names another recipe. `before`: the recipes that wait for this
    start, to detect circles."""
    config = loaded.config
    recipe = recipe_named(config.run.start_from) if config.run.start_from else None
    if recipe is None:
        return None
    if recipe in before:
        circle = " -> ".join([*before[before.index(recipe) :], recipe])
        raise ConfigError(
            f"run.start_from: recipes start from each other in a circle: {circle}; set null in one of them"
        )
    command = commands_of_recipe(recipe)[0]
    arguments = (f"recipe={recipe}", *said_for_both(loaded, COMMANDS[command]))
    try:
        first = load([*arguments], entry=command)
    except ConfigError as err:
        raise ConfigError(f"run.start_from={recipe}: {err}") from None
    assert first is not None, "it was asked for no help"
    run = FirstRun(recipe, command, arguments, replace(first, flags=loaded.flags))
    finished = finished_runs(first, config.policy)
    folder = next((path for path, other in finished.items() if not other), None)
    return replace(run, folder=folder, trained_otherwise=None if folder else next(iter(finished.items()), None))


def recipe_named(start: Path) -> str | None:
    """The recipe in `run.start_from`; None if it is a folder."""
    if start.is_dir():
        return None
    if str(start) in recipe_names() or (start.suffix in (".yaml", ".yml") and start.is_file()):
        return str(start)
    raise ConfigError(
        f"run.start_from={start}: there is no such folder (of a run, a checkpoint or a policy), and no recipe of this "
        f"name{nearest(start.name, recipe_names())}"
    )


def said_for_both(loaded: Loaded, command: Command) -> list[str]:
    """Arguments of the command line that also hold for the first run, which is one of `command`."""
    values = loaded.config.model_dump(mode="json")
    both = [key for key in loaded.asked if is_one_of(key, ALSO) and not command.ignores(key)]
    return [f"{key}={write_yaml(reduce(getitem, key.split('.'), values))}" for key in both]


def start_of_resumed(run: Path, asked: Path) -> Path | None:
    """The start of the resumed run, if `asked` names its folder or a recipe."""
    start = resolved_recipe(run).get("run", {}).get("start_from")
    if not start or not Path(start).is_absolute():
        return None
    return Path(start) if asked == Path(start) or recipe_named(asked) else None


def finished_runs(first: Loaded, policy: Any) -> dict[Path, str]:
    """The finished runs of this recipe in run.dir with the same env and policy, newest first; and for each an option of
    training in which it differs, or ""."""
    finished: dict[Path, str] = {}
    runs = first.config.run.dir.glob(f"{escape(first.name)}-[0-9]*/run.json")
    for file in sorted(runs, key=lambda path: path.stat().st_mtime, reverse=True):
        run = file.parent
        try:
            if read_json(file).get("state") == "finished" and same_task(run, first.config):
                find_start(run, policy)
                finished[run] = different_training(run, first)
        except (CheckpointError, ConfigError):
            continue  # of another policy, or damaged
    return finished


def same_task(run: Path, config: RunConfig) -> bool:
    """True if a run was trained in this recipe's env; options newer than the run, or left to the task, are not
    compared."""
    env, wanted = resolved_recipe(run).get("env", {}), config.env.model_dump(mode="json")
    return all(None in (value, env.get(key)) or env[key] == value for key, value in wanted.items() if key not in ASIDE)


def different_training(run: Path, first: Loaded) -> str:
    """An option in which a run's training differs from this recipe's; "" if none does. Options newer than the run are
    not compared."""
    then, now = flat_dict(resolved_recipe(run)), flat_dict(first.config.model_dump(mode="json"))
    different = (
        key
        for key, value in now.items()
        if key.startswith(DECIDES) and key.partition(".")[2] not in WHERE and then.get(key, value) != value
    )
    return next(different, "")


def starting_from(config: RunConfig, folder: Path) -> RunConfig:
    """The config with this folder in `run.start_from`, so that a resumed run finds it."""
    return config.with_values("run", start_from=folder.absolute())


def imitating_as(folder: Path, config: RunConfig) -> RunConfig:
    """The config with the demonstrations that this start imitated in algo.imitation, if that is set and names none."""
    kept = config.algo.imitation
    if kept is None or kept.data is not None or env_class(config.env).speaks:
        return config
    recipe = stored_recipe(folder)
    sft = (resolved_recipe(recipe.parent) if recipe else {}).get("sft", {})
    if sft.get("data") is None or not Path(sft["data"]).exists():
        lacking = f"imitated {sft['data']}, which is gone" if sft.get("data") else "imitated no demonstrations"
        raise ConfigError(f"run.start_from={folder} {lacking}; set algo.imitation.data=FOLDER")
    taken = {name: sft[name] for name in ("names", "episodes") if name not in kept.model_fields_set}
    return config.with_values("algo", imitation=kept.model_copy(update={**taken, "data": Path(sft["data"])}))
