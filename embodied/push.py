"""Put a trained policy on the Hugging Face hub, with a card: python -m embodied.push runs/NAME-DATE USER/NAME

usage: python -m embodied.push RUN USER/NAME [yes=true] [private=false] [licence=apache-2.0] [out=FOLDER]

  RUN                a run's folder, one of its checkpoints, or a policy folder
  USER/NAME          the repository, which is made if there is none
  yes=true           uploads; without it the files are only written to a folder and shown
  private=false      everybody may read a new repository [only you and your organisation]
  licence=NAME       the licence in the card, by the hub's name of it, such as apache-2.0 or mit [none is stated]
  out=FOLDER         where the files are written [hub/USER-NAME beside the checkpoints]

A policy that began with a published folder is written in that folder's layout, SmolVLA and Pi0 from lerobot as lerobot
reads them; other policies as checkpoints have them. The token is that of `hf auth login`, or HF_TOKEN.
"""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

import yaml
from pydantic import Field

from embodied.config.command_line import stored_recipe
from embodied.core.errors import CheckpointError, ConfigError, EmbodiedError, in_a_line
from embodied.core.files import as_path, whole_folder
from embodied.core.options import Strict
from embodied.policies.config import POLICY_CONFIGS
from embodied.policies.hub import HUB_ID
from embodied.policies.policy_folder import CONFIG, published_family, read_json
from embodied.records.progress import commit
from embodied.records.success_stats import describe_results
from embodied.run import launch
from embodied.run.policy_source import PolicySource, find, resolved_recipe

USAGE = "which policy, and where to? python -m embodied.push runs/NAME-DATE USER/NAME"
CARD, RECIPE, FILM = "README.md", "recipe.yaml", "film.mp4"
ORIGIN = "origin.json"  # of an exported or pushed policy: what a card says of its training, which others read on
HERE = ("run", "resume", "cluster", "placement")  # sections of a recipe that are about this machine


class Options(Strict):
    """The command's own options."""

    yes: bool = Field(False, description="Upload.")
    private: bool = Field(True, description="Whether a new repository is private.")
    licence: str | None = Field(None, pattern=r"[\w.-]+", description="In the card.")
    out: str | None = Field(None, description="A folder for the files.")


@dataclass(frozen=True)
class Evaluated:
    """An evaluation of the very weights that are pushed."""

    results: dict[str, Any]
    film: Path | None  # of a success, if there is one


def main(argv: list[str] | None = None) -> int:
    return launch.run(start, argv, __doc__)


def start(argv: list[str]) -> None:
    named = [word for word in argv if "=" not in word]
    if len(named) != 2 or any(word.startswith("-") for word in named):
        raise ConfigError(USAGE)
    options, rest = launch.own_options(Options, [word for word in argv if "=" in word])
    if rest:
        raise ConfigError(f"{rest[0].partition('=')[0]} has no effect here; leave it out, or see --help")
    push(*named, options)


def push(policy: str, repository: str, options: Options, hub: Any = None) -> Path:
    """Write the folder, show it, and with `yes` upload it through `hub`, the HfApi; returns the folder."""
    if not HUB_ID.fullmatch(repository):
        raise ConfigError(f"{repository} is no name of a repository: USER/NAME")
    source = find(policy)
    if source.folder is None:
        raise ConfigError(f"{policy} has no weights to upload; name a run or a policy folder")
    recipe = stored_recipe(source.folder)
    beside = recipe.parent if recipe else source.folder.resolve().parent
    out = as_path(options.out) if options.out else beside / "hub" / repository.replace("/", "-")
    if out.exists() and not (out / CARD).is_file():
        raise ConfigError(f"out={out} holds something else; name a new folder")
    write(out, source, recipe, repository, options)
    show(out, repository, options)
    if options.yes:
        upload(out, repository, options, hub or hub_itself())
    else:
        print("nothing was uploaded: the same command with yes=true does")
    return out


# The folder


def write(out: Path, source: PolicySource, recipe: Path | None, repository: str, options: Options) -> None:
    """The model's files, the recipe, a film, the card: whole or not at all."""
    with whole_folder(out) as aside:
        write_model(aside, source)
        played = evaluation_of(source, recipe.parent if recipe else None)
        origin = origin_of(source, recipe, played)
        if asked := origin["recipe"]:
            (aside / RECIPE).write_text(yaml.safe_dump(asked, sort_keys=False, allow_unicode=True), encoding="utf-8")
        (aside / ORIGIN).write_text(json.dumps(origin, indent=2) + "\n", encoding="utf-8")
        if played and played.film:
            shutil.copyfile(played.film, aside / FILM)
        (aside / CARD).write_text(card(aside, source, origin, repository, options), encoding="utf-8")


def write_model(folder: Path, source: PolicySource) -> None:
    """The weights, in the layout of the published folder that the run began with, else in ours."""
    from embodied.policies import load_policy

    assert source.folder is not None, "it has weights"
    description = read_json(source.folder / CONFIG)
    began = getattr(source.config, "pretrained", None) and description.get("published_weights", True)
    if "base" in description or (began and source.config.published and not source.config.speaks):
        load_policy(source.folder, source.config.name).save_published(folder)
    else:
        shutil.copytree(source.folder, folder, dirs_exist_ok=True)


def origin_of(source: PolicySource, recipe: Path | None, played: Evaluated | None) -> dict[str, Any]:
    """What a card says of the policy's training and success; what is written beside an exported or pushed one."""
    if source.folder and (written := source.folder / ORIGIN).is_file():
        made = read_json(written)
        recipe_then, keys = made.get("recipe"), {"name", "family", "sha256", "recipe", "imitates", "success"}
        sections = recipe_then if isinstance(recipe_then, dict) else {"policy": None}
        whole = not sections or all(isinstance(sections.get(name), dict) for name in ("policy", "algo", "env"))
        if not whole or not made.keys() >= keys:
            raise CheckpointError(f"{written} is not what embodied.export or push wrote; make the folder again")
        return made | ({"success": success(played)} if played else {})
    made = recipe and recipe.with_name("run.json")
    return {
        "name": source.name,
        "family": source.config.name,
        "sha256": source.described()["sha256"],
        "recipe": recipe_without_places(recipe) if recipe else {},
        "imitates": bool(made and made.is_file() and read_json(made).get("command") == "sft"),
        "success": success(played),
    }


def recipe_without_places(recipe: Path) -> dict[str, Any]:
    """The run's recipe, without folders and machines."""
    stated = without_folders(resolved_recipe(recipe.parent))
    kept = {key: value for key, value in stated.items() if key not in HERE}
    return {"run": {key: stated["run"].get(key) for key in ("env_steps", "iterations")}, **kept}


def without_folders(value: Any) -> Any:
    """The values; absolute paths are cut to their last name."""
    if isinstance(value, dict):
        return {key: without_folders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_folders(item) for item in value]
    return Path(value).name if isinstance(value, str) and value.startswith("/") else value


def evaluation_of(source: PolicySource, run: Path | None) -> Evaluated | None:
    """The evaluation of these weights with the most episodes."""
    folders, best = (run or source.folder.parent).glob("eval/*/results.json"), None
    for file in folders:
        with suppress(CheckpointError, KeyError, TypeError):
            results = read_json(file)
            same = results["policy"]["sha256"] == source.described()["sha256"]
            if same and (best is None or results["overall"]["episodes"] > best.results["overall"]["episodes"]):
                films = sorted(file.parent.glob("videos/*.mp4"), key=lambda film: "_success_" not in film.name)
                best = Evaluated(results, films[0] if films else None)
    return best


# The card


def card(folder: Path, source: PolicySource, origin: dict[str, Any], name: str, options: Options) -> str:
    """The model card: the policy, its success, its training, and commands that use it."""
    recipe = origin["recipe"]
    family, env = source.config.name, recipe.get("env") or {}
    format_of = "lerobot" if read_json(folder / CONFIG).get("type") == family else ""
    kind = "text-generation" if source.config.speaks else "robotics"
    task = " ".join(str(env[key]) for key in ("name", "task") if env.get(key))
    head = {"license": options.licence, "library_name": format_of or "embodied-loop", "pipeline_tag": kind}
    head["tags"] = ["embodied-loop", "reinforcement-learning", family]
    stated = yaml.safe_dump({key: value for key, value in head.items() if value}, sort_keys=False)
    began = recipe.get("policy", {}).get("pretrained")
    kind_of_policy = f"A {family}" if origin["family"] == family else f"An exported {origin['family']}"
    lines = [
        f"---\n{stated}---",
        f"# {name.partition('/')[2]}",
        f"{kind_of_policy} policy" + (f" for {task}." if task else "."),
    ]
    lines += [
        "## Success",
        origin["success"],
        *([f"[A film]({FILM}) of an episode."] if (folder / FILM).is_file() else []),
    ]
    lines += ["## Training"]
    if recipe:
        algo = {"name": "imitation"} if origin["imitates"] else recipe["algo"]
        start = f", from {Path(began).name}" if began else ""
        start += ", with an imitation loss beside it" if algo.get("imitation") else ""
        lines += [f"By {algo['name']}{start}, seed {recipe.get('seed')}; [`{RECIPE}`]({RECIPE}) has all settings.",
                  f"Checkpoint {origin['name']}, SHA-256 of its weights {origin['sha256']}."]  # fmt: skip
    lines += [f"Made with Embodied Loop, commit {commit() or 'unknown'}.", "## Use", use(folder, name, family, env)]
    return "\n\n".join(lines) + "\n"


def success(played: Evaluated | None) -> str:
    """The rates with intervals, and the protocol."""
    if played is None:
        return "These weights were not evaluated."
    results = played.results
    protocol, asked = results["protocol"], results["protocol"]["eval"]
    late = f", with a delay of {asked['delay']} env steps" if asked.get("delay") else ""
    return (
        f"{describe_results(results)}; rates have 95% Wilson intervals.\n\n"
        f"Protocol {protocol['name']} ({protocol['rules']}), eval.seed={asked['seed']}{late}, "
        f"physics {protocol.get('backend') or 'of the env'}."
    )


def use(folder: Path, name: str, family: str, env: dict[str, Any]) -> str:
    """Commands and code that take the repository."""
    named = " ".join(f"env.{key}={env[key]}" for key in ("name", "task") if env.get(key)) or "env.name=NAME"
    code = [f"python -m embodied.evaluate checkpoint={quote(name)}" + f" {named}"]
    if (kind := published_family(folder)) and not POLICY_CONFIGS[kind].speaks:
        code.append("python -m embodied.train recipe=NAME" + f" policy.name={family} policy.pretrained={name}")
    text = "```bash\n" + "\n".join(code) + "\n```"
    if kind and (other := POLICY_CONFIGS[kind].loaded_by):
        text += f"\n\n```python\n{other.format(name=name)}\n```"
    return text


# The hub


def show(folder: Path, repository: str, options: Options) -> None:
    """The files with their sizes, and the card."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    print(f"repository  {repository}, {'private' if options.private else 'for everybody to read'}")
    for file in files:
        print(f"  {file.stat().st_size / 1e6:10.3f} MB  {file.relative_to(folder)}")
    print(f"  {sum(file.stat().st_size for file in files) / 1e6:10.3f} MB  in all, in {folder}")
    print(f"card        {folder / CARD}:\n")
    print("\n".join(f"    {line}".rstrip() for line in (folder / CARD).read_text(encoding="utf-8").splitlines()))
    print(flush=True)


def hub_itself() -> Any:
    try:
        from huggingface_hub import HfApi
    except ModuleNotFoundError:
        raise ConfigError(
            "uploading needs the package huggingface_hub: python -m pip install huggingface_hub"
        ) from None
    return HfApi()


def upload(folder: Path, repository: str, options: Options, hub: Any) -> None:
    """Upload all files in one commit, without deleting any file. Raises EmbodiedError with the next step."""
    again = f"{folder} is whole; the same command goes on, and sends no file twice that has arrived"
    try:
        hub.whoami()
    except Exception as err:  # no token, an expired token, or no connection
        raise EmbodiedError(
            f"the hub does not know you ({in_a_line(err)}): hf auth login, or HF_TOKEN; {again}"
        ) from None
    try:
        hub.create_repo(repository, private=options.private, repo_type="model", exist_ok=True)
        if options.private and not hub.repo_info(repository, repo_type="model").private:
            raise ConfigError(
                f"{repository} is there already, and everybody may read it; if that is right: private=false"
            )
        made = hub.upload_folder(
            repo_id=repository, folder_path=str(folder), repo_type="model", commit_message=f"Upload {folder.name}"
        )
    except EmbodiedError:
        raise
    except Exception as err:  # not yours, full, or the connection broke
        raise EmbodiedError(f"{repository} was not uploaded ({in_a_line(err)}); {again}") from None
    print(f"uploaded    {getattr(made, 'commit_url', made)}")
    print(f"evaluate    python -m embodied.evaluate checkpoint={quote(repository)}" + " env.name=NAME")


if __name__ == "__main__":
    raise SystemExit(main())
