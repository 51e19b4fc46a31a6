"""The answers to a user: `--help`, `--cfg`, and a line for every mistake, with key, value, reason and source.

For an unknown key the nearest key by its last part is suggested. Names of our keys in Stable-Baselines3, CleanRL,
rsl_rl, ManiSkill's scripts, RLinf and TRL count: learning_rat is algo.lr. A run without mistakes imports none of it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from itertools import takewhile
from pathlib import Path
from textwrap import wrap
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from typing_extensions import is_typeddict

from embodied.config.read import Command, Section, Tree, as_yaml_value, choices, leaves
from embodied.config.recipe_files import BY_TASK, RECIPES, by_family, recipe_names
from embodied.core.errors import ConfigError, nearest
from embodied.core.plugins import Plugins

INDENT = 30
WIDTH = 118
MOST = 20  # largest number of shown mistakes

OURS = {  # our keys -> names in other toolkits; a name may mean two keys
    "recipe": "config config_name config_path config_file cfg yaml",
    "seed": "random_seed rng_seed manual_seed random_state seeds",
    "resume": "resume_from resume_path resume_from_checkpoint load_run",
    "placement": "num_workers n_workers num_processes n_jobs component_placement",
    "run.env_steps": "total_timesteps timesteps num_timesteps max_timesteps total_steps steps total_env_steps "
    "num_env_steps",
    "run.iterations": "max_iterations num_iterations n_iterations num_updates max_epochs max_steps training_steps",
    "run.eval_every": "eval_freq eval_interval eval_frequency val_check_interval test_freq eval_steps",
    "run.save_every": "save_freq save_interval save_steps checkpoint_interval checkpoint_freq",
    "run.keep": "save_total_limit max_checkpoints",
    "run.dir": "log_dir logdir save_dir output_dir log_path experiment_dir tensorboard_log",
    "run.name": "exp_name experiment_name run_name",
    "run.log": "track wandb use_wandb report_to log_with logger logger_backends",
    "run.start_from": "checkpoint load_path init_from",
    "env.name": "simulator env_type simulator_type",
    "env.task": "env_id env_name task_name task_id environment",
    "env.num_envs": "num_envs n_envs nenvs num_environments total_num_envs env_num",
    "env.max_episode_steps": "max_episode_length episode_length max_episode_len time_limit",
    "env.backend": "sim_backend physics_backend",
    "env.control_mode": "controller controller_type",
    "env.robot": "robot_uids robots",
    "env.reward_mode": "reward_type",
    "env.on_success": "partial_reset ignore_terminations auto_reset",
    "env.state env.cameras": "obs_mode observation_mode",
    "policy.name": "model policy_type model_type network",
    "policy.pretrained": "model_path model_name model_name_or_path pretrained_path",
    "policy.hidden": "hidden_sizes hidden_dims hidden_dim hidden_size actor_hidden_dims net_arch",
    "policy.activation": "activation_fn",
    "policy.initial_log_std": "log_std_init init_noise_std action_std_init",
    "policy.normalize_observations": "normalize_obs norm_obs obs_normalization empirical_normalization",
    "policy.max_tokens": "max_new_tokens max_completion_length max_response_length response_length",
    "policy.max_length": "max_prompt_length max_seq_len max_model_len",
    "policy.lora_rank": "lora_r",
    "policy.lora_scale": "lora_alpha",
    "algo.name": "algorithm adv_type",
    "algo.lr": "lr learning_rate actor_lr policy_lr",
    "algo.value_lr": "critic_lr vf_lr critic_learning_rate",
    "algo.critic_warmup": "critic_warmup_steps critic_warmup_iters value_warmup num_critic_warmup_steps",
    "algo.lr_schedule": "anneal_lr lr_scheduler lr_scheduler_type",
    "algo.gamma": "gamma discount discount_factor",
    "algo.gae_lambda": "lam lambda lmbda gae_lam",
    "algo.rollout_decisions": "n_steps num_steps nsteps num_steps_per_env rollout_steps rollout_length horizon_length",
    "algo.minibatch_size": "batch_size mini_batch_size num_minibatches num_mini_batches global_batch_size",
    "algo.epochs": "n_epochs num_epochs update_epochs ppo_epochs num_learning_epochs update_epoch",
    "algo.clip_low algo.clip_high": "clip_range clip_coef clip_param clip_ratio cliprange epsilon eps_clip",
    "algo.value_clip": "clip_range_vf clip_vloss cliprange_value use_clipped_value_loss",
    "algo.entropy_coef": "ent_coef entropy_coeff entropy_bonus",
    "algo.value_coef": "vf_coef value_loss_coef vf_coeff critic_coef",
    "algo.normalize_advantages": "norm_adv normalize_advantage",
    "algo.target_kl": "desired_kl kl_target",
    "algo.kl_coef": "beta kl_beta kl_coeff init_kl_coef kl_loss_coef",
    "algo.max_grad_norm": "grad_clip gradient_clip clip_grad max_norm",
    "algo.group_size": "num_generations rollout_n num_return_sequences",
    "algo.adam_eps": "adam_epsilon optimizer_eps",
    "learner.device": "device cuda use_cuda",
    "learner.micro_batch_size": "micro_batch per_device_train_batch_size gradient_accumulation_steps",
    "learner.precision": "bf16 fp16 torch_dtype mixed_precision",
    "learner.checkpoint_activations": "gradient_checkpointing activation_checkpointing",
    "eval.episodes": "n_eval_episodes num_eval_episodes eval_episodes num_eval_steps",
    "eval.num_envs": "num_eval_envs n_eval_envs",
    "eval.videos": "capture_video record_video save_video num_videos",
}
USUAL = {word: keys.split() for keys, words in OURS.items() for word in words.split()}
CLOSE = 0.8  # limit of difflib's ratio, for the last part of a key; 0.6 for a whole key
FAR = 0.6


# Help, and the resolved recipe


def help_text(command: Command, schema: Section, words: Sequence[str] = ()) -> str:
    """The answer to --help; with words, only the keys with these words in name or meaning."""
    if words:
        return found_text(command, schema, words)
    first = next((key for key in command.arguments if key != "program"), "recipe")
    arguments = command.arguments | command.several
    lines = [
        command.purpose,
        "",
        f"usage: python -m embodied.{command.name} {first}={'NAME' if first == 'recipe' else '...'} [key=value ...] "
        "[--cfg | --dry-run | --help [WORD]]",
        "",
        *recipe_lines(),
        *[line for key, meaning in arguments.items() for line in wrap_help(key, meaning)],
        *wrap_help("--cfg", "print the resolved recipe and where each value comes from; it can be saved and loaded"),
        *wrap_help("--dry-run", "check everything and say what would run where, then stop"),
        *wrap_help("--help WORD", "only the keys of a section, or with this in their name: --help algo, --help lr"),
        "",
        "Values are YAML: algo.lr=1e-4  policy.hidden='[64, 64]'  algo.target_kl=null",
        "In a recipe file, `extends: NAME` starts from another one. Defaults are in brackets; a key that only some",
        "kinds of env, policy or algorithm have is marked with them.",
        *key_lines(entries(command, schema)),
    ]
    return "\n".join(lines)


def found_text(command: Command, schema: Section, words: Sequence[str]) -> str:
    """The keys with these words in their names; if no name has a word, the keys with it in their help."""
    every = entries(command, schema)
    keys = list(dict.fromkeys(key for key, _ in every))
    lines, chosen = [], {}
    for word in map(as_word, words):
        if word == "recipe":
            lines += recipe_lines()
            continue
        lines += [line for key in command.arguments if key == word for line in wrap_help(key, command.arguments[key])]
        named = [key for key in keys if word in key.split(".")[:-1]] or [key for key in keys if word in key]
        named += [key for key in USUAL.get(word, ()) if key in keys]
        matches = {at: owners for at, owners in every.items() if at[0] in named}
        matches = matches or {at: owners for at, owners in every.items() if word in at[1].lower()}
        chosen |= matches
        if not (matches or lines):
            lines.append(f"no key of {command.name} has {word!r} in its name or meaning{hint(word, keys)}")
    return "\n".join([*lines, *key_lines(chosen)]).strip("\n")


def recipe_lines() -> list[str]:
    """The recipes by family, and the forms of recipe=."""
    lines = wrap_help("recipe", "a name of these, one of recipes/tiny (python -m embodied.list), or path/to/my.yaml")
    for family, names in by_family(recipe_names(RECIPES, *BY_TASK)).items():
        lines += wrap_help(f"  {family}", ", ".join(names))
    return lines


def key_lines(entries_shown: dict[tuple[str, str], list[str]]) -> list[str]:
    """The keys with their meaning, an empty line before each section."""
    lines, section = [], ""
    for (key, text), owners in entries_shown.items():
        head = key.partition(".")[0]
        if head != section:
            section = head
            lines.append("")
        kind = f"({', '.join(owners)}) " if owners[0] else ""
        lines += wrap_help(key, f"{kind}{text}")
    return lines


def wrap_help(key: str, text: str) -> list[str]:
    line = f"  {key:<{INDENT - 1}} {text}"
    return wrap(line, WIDTH, subsequent_indent=" " * (INDENT + 4), break_on_hyphens=False)


def entries(command: Command, schema: Section) -> dict[tuple[str, str], list[str]]:
    """For each (key, description) of a section the variants that have it."""
    tags: dict[tuple[str, str], list[str]] = {}
    for key, option, only in leaves(schema):
        if not command.ignores(key):
            tags.setdefault((key, describe(option)), []).append(only)
    return tags


def describe(field: FieldInfo) -> str:
    """The type, default and meaning of a field."""
    default = "needed" if field.is_required() else as_yaml_value(field.get_default(call_default_factory=True))
    fixed = get_origin(field.annotation) is Literal and len(get_args(field.annotation)) == 1
    return f"{'text' if fixed else name_of(field.annotation)} [{default}]  {field.description or ''}"


def name_of(kind: Any) -> str:
    """A type in the user's words."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        return "|".join(map(str, args))
    if origin in (Union, UnionType):
        return "|".join(name_of(arg) for arg in args if arg is not type(None))
    if origin is tuple:
        return f"list of {name_of(args[0])}"
    if origin is dict or kind is dict:
        return "map"
    if origin is not None:
        return name_of(args[0])
    names = {str: "text", int: "integer", float: "number", bool: "true|false", Path: "path"}
    return names.get(kind, getattr(kind, "__name__", str(kind)))


# Mistakes


def not_a_setting(arg: str, flags: Iterable[str], folder_key: str, has_recipes: bool) -> str:
    """The message for an argument that is neither a flag nor key=value, with the setting that is meant."""
    key, equals, text = arg.partition("=")
    bare = key.lstrip("+-~")
    ours = USUAL.get(as_word(bare), [bare])[0] if has_recipes else bare
    value = text if equals else "VALUE"
    if key.startswith("-") and not equals and ours == bare:
        near = nearest(key, flags, 0.6, ", ")
        return f"{key}: unknown option{near}; options: --help, --cfg, --dry-run; settings: key=value"
    if key.startswith("~"):
        return f"{key}: a key cannot be deleted; write {bare}=null if it may be empty, or {bare}=VALUE"
    if bare != key:
        return f"{arg}: write {ours}={value}; keys are set without {key[: len(key) - len(bare)]}"
    if equals:
        return f"{arg}: {key!r} is not a key; write key=value, for example algo.lr=1e-4"
    guess = "key=value, for example algo.lr=1e-4"
    if has_recipes and (key in recipe_names() or key.endswith((".yaml", ".yml"))):
        guess = f"recipe={key}"
    elif "/" in key:
        guess = f"{folder_key}={key}"
    return f"{key!r} is not a setting; write {guess}"


def config_error(problems: Iterable[str]) -> ConfigError:
    """The error that lists these problems."""
    lines = list(dict.fromkeys(line for problem in problems for line in problem.split("\n")))
    if len(lines) == 1:
        return ConfigError(lines[0])
    shown = [*lines[:MOST], f"and {len(lines) - MOST} more"] if len(lines) > MOST else lines
    return ConfigError(f"{len(lines)} mistakes:\n" + "\n".join(f"  {line}" for line in shown))


def explain(
    errors: list[ErrorDetails], root: Section, tree: Tree, incomplete: bool = False, command: Command | None = None
) -> list[str]:
    """pydantic's errors, a line each. If a source was unreadable (`incomplete`), missing keys are left out. Suggestions
    take time, so only the first mistakes get them."""
    lines: list[str] = []
    above = {error["loc"][:depth] for error in errors for depth in range(len(error["loc"]))}
    for error in errors:
        if error["loc"] in above or (incomplete and error["type"] == "missing"):  # an error below says more
            continue
        if len(lines) < MOST:
            lines += _explain(error, root, tree, command)
        else:
            lines.append(f"{'.'.join(map(str, error['loc']))}: {error['msg']}")
    return lines


def _explain(error: ErrorDetails, root: Section, tree: Tree, command: Command | None) -> list[str]:
    path = ".".join(takewhile(lambda part: "[" not in part, map(str, error["loc"])))  # without the names of validators
    kind = error["type"]
    if kind == "union_tag_invalid":  # a section with an unknown name
        path, error = f"{path}.name", {**error, "input": error["ctx"]["tag"]}
    if kind == "extra_forbidden":
        set_below = [key for key in tree.sources if key == path or key.startswith(path + ".")]
        return [unknown_key(key, root, tree, command) for key in set_below or [path]]
    if kind == "value_error":
        text = str(error["ctx"]["error"])
        if re.match(r"[a-z]+(\.\w+)*=", text) or text.startswith(f"{path}.") or "\n" in text:
            return [line + came_from(keys_in(line, tree) or [path], tree) for line in text.split("\n")]
        return [f"{path}={shorten(error['input'])}: {text}{came_from([path], tree)}"]
    if kind == "missing":
        return [f"{path} is missing{came_from([path.rpartition('.')[0]], tree)}"]
    return [f"{path}={shorten(error['input'])}: {reason(error, path, root, tree)}{came_from([path], tree)}"]


def reason(error: ErrorDetails, path: str, root: Section, tree: Tree) -> str:
    """Says why the value is wrong, and names a value that works."""
    kind, value = error["type"], error["input"]
    allowed = [*dict.fromkeys(str(word) for word in allowed_words(path, root, tree))]
    if kind == "union_tag_invalid" or (kind == "literal_error" and allowed):  # none are known inside a map
        return f"unknown{nearest(str(value), allowed, 0.6, ', ') or ';'} known: {', '.join(allowed)}"
    if kind == "string_type" and isinstance(value, dict | list):
        return f"should be text, which is quoted twice: {path}='\"...\"'"
    if kind == "string_type":
        return f"should be text; write {path}='\"{value}\"'" if value is not None else "should be text, not empty"
    if kind == "tuple_type":
        return f"should be a list; write {path}='[{value if isinstance(value, str) else shorten(value)}]'"
    if kind == "path_type":
        return "should be a path"
    if kind in ("dict_type", "model_type", "model_attributes_type"):
        fields = fields_of(path.split("."), root, tree)
        return f"should be a map, such as {path}='{{{fields[0] if fields else 'name'}: ...}}'" + (
            f"; its keys: {', '.join(fields)}" if fields else ""
        )
    text = error["msg"].removeprefix("Input ")
    return text[0].lower() + text[1:]


def unknown_key(path: str, root: Section, tree: Tree, command: Command | None) -> str:
    """The message for an unknown key, with the nearest known key or the variant that has this key."""
    if path == "recipe":
        return f"recipe: a recipe names its base with `extends`{came_from([path], tree)}"
    *above, name = path.split(".")
    section, section_path = root.section_at(above), ".".join(above)
    if section and (owners := [tag for tag, model in section.variants.items() if name in model.model_fields]):
        chosen = (tree.section(above) or {}).get("name", "the default")
        variants = " or ".join(f"{section_path}.name={tag}" for tag in owners)
        return f"{path} is a key of {variants}, but {section_path}.name is {chosen}{came_from([path], tree)}"
    if fields := fields_of(above, root, tree):
        near = nearest(name, fields, FAR, ", ") or ";"
        return f"{path}: unknown key{near} known: {', '.join(fields)}{came_from([path], tree)}"
    keys = [key for key, _, only in leaves(root) if not only or only == chosen_variant(key, root, tree)]
    if command:
        keys = ["recipe", *command.arguments, *(key for key in keys if not command.ignores(key))]
    return f"{path}: unknown key{hint(path, list(dict.fromkeys(keys)))}{came_from([path], tree)}"


def fields_of(path: list[str], root: Section, tree: Tree) -> list[str]:
    """The fields of a key whose value is a map with fixed fields; empty for other keys."""
    section = root.section_at(path[:-1])
    field = section.field(path[-1], tree.section(path[:-1])) if section and path else None
    options = get_args(field.annotation) if field and get_origin(field.annotation) in (Union, UnionType) else ()
    for kind in (field.annotation, *options) if field else ():
        if is_typeddict(kind):
            return [*kind.__annotations__]
        if isinstance(kind, type) and issubclass(kind, BaseModel) and not root.section_at(path):
            return [*kind.model_fields]
    return []


def chosen_variant(path: str, root: Section, tree: Tree) -> str | None:
    """The tag of the configured variant of a key's section."""
    above = path.split(".")[:-1]
    section = root.section_at(above)
    return section and section.tag(tree.section(above) or {})


def allowed_words(path: str, root: Section, tree: Tree) -> list[Any]:
    """The allowed words of a key, if they are fixed."""
    *above, name = re.sub(r"(\.\d+)+$", "", path).split(".")  # without the place in a list
    section = root.section_at(above)
    if section is None:
        return []
    if name == "name":
        if isinstance(section.variants, Plugins):
            return section.variants.names
        return [word for model in section.variants.values() for word in choices(model.model_fields["name"].annotation)]
    return choices(section.field(name, tree.section(above)).annotation)


def keys_in(text: str, tree: Tree) -> list[str]:
    """The keys in a message with a known source."""
    return [key for key in dict.fromkeys(re.findall(r"[a-z_]+(?:\.\w+)*", text)) if key in tree.sources]


def came_from(keys: list[str], tree: Tree) -> str:
    """` (from recipes/x.yaml)`: the sources of the keys and of their subkeys."""
    places = {}
    for key in keys:
        for key_with_source, where in tree.sources.items():
            if key_with_source == key or key_with_source.startswith(key + ".") or key.startswith(key_with_source + "."):
                places.setdefault(where, key)
    if len(places) > 1:
        return f" ({', '.join(f'{key} from {where}' for where, key in places.items())})"
    return f" (from {next(iter(places))})" if places else ""


def shorten(value: Any) -> str:
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


# Suggestions


def likely_keys(key: str, our_keys: list[str]) -> list[str]:
    """The keys among `our_keys` that a misspelt or foreign name most likely means; the likeliest first."""
    section, _, last = key.rpartition(".")
    word = as_word(last)
    if as_word(key) in our_keys:
        return [as_word(key)]
    ours: dict[str, list[str]] = {}
    for our_key in our_keys:
        ours.setdefault(our_key.rpartition(".")[2], []).append(our_key)
    if word in USUAL:
        return in_section(section, USUAL[word], our_keys)
    if word in ours:
        return in_section(section, ours[word], our_keys)
    theirs = {
        name: matching
        for name, keys in USUAL.items()
        if name not in our_keys and (matching := in_section(section, keys, our_keys))
    }
    beside = [our_key for our_key in our_keys if section and our_key.startswith(f"{section}.")]
    for names in ({our_key.rpartition(".")[2]: [our_key] for our_key in beside}, ours | theirs):
        if near := difflib.get_close_matches(word, list(names), 1, CLOSE):
            return names[near[0]]
    return difflib.get_close_matches(key, our_keys, 1, FAR)


def in_section(section: str, keys: list[str], names: list[str]) -> list[str]:
    """The known keys among these: in that section if it has them, else as they are, else in another section."""
    ends = [key.rpartition(".")[2] for key in keys]
    of_section = [path for end in ends if (path := f"{section}.{end}") in names] if section else []
    return (
        of_section or [key for key in keys if key in names] or [key for key in names if key.rpartition(".")[2] in ends]
    )


def as_word(word: str) -> str:
    return word.strip("-+~").replace("-", "_").lower()


def hint(key: str, names: list[str]) -> str:
    """`, did you mean 'algo.lr'?`, or nothing."""
    likely = likely_keys(key, names)
    return f", did you mean {' or '.join(map(repr, likely))}?" if likely else ""
