"""The sections of a recipe for the whole run."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator

from embodied.core.files import as_path
from embodied.core.options import LocalPath, PathOrRecipe, Strict, never_with, one_or_several, only_with
from embodied.core.plugins import LOGGER_CLASSES
from embodied.placement.grammar import MAP_EXAMPLE, MODES, parse_map
from embodied.placement.topology import PlacementError

ADDRESS = re.compile(r"[\w.-]+:\d+")
HARDWARE = re.compile(r"(?:[\w.-]+/)?(?P<kind>[a-z]\w*):\d+")
LONGEST_NAME = 100  # bytes of run.name
SCORERS = ("verifier", "reward_model", "judge")  # options that replace rewards; only one may be set


class RolesSection(Strict):
    reference: bool = Field(
        False, description="Compute the reference policy of algo.kl_coef in a separate role instead of in the learners."
    )
    critic: bool = Field(
        False,
        description="With algo.name=ppo and a text env: values come from a second network, as large as the policy, in "
        "a separate role, instead of from policy.value_head.",
    )
    critic_lr: float | None = Field(
        None, ge=0, description="The critic's learning rate; null: algo.value_lr, or if that is unset algo.lr."
    )
    verifier: str | None = Field(
        None,
        description="my_pkg.my_module:my_function, which returns a conversation's reward for its prompt and last "
        "answer (texts), instead of the env's reward.",
    )
    reward_model: str | None = Field(
        None,
        description="Folder of a sequence classifier of transformers, which reads whole conversations as text, of "
        "longer ones than it can read the end. The reward is its logit, or with several labels the last label's "
        "probability.",
    )
    judge: str | None = Field(
        None,
        description="Folder of a language model that is asked about every answer, or start: the policy that the run "
        "starts from.",
    )
    judge_prompt: str = Field(
        "{asked}", description="The judge's prompt: {asked} stands for the policy's prompt, {answer} for its answer."
    )
    judge_says: str | None = Field(
        None,
        description="The reward is 1 if the judge's answer begins with this, else 0; null: if it equals the policy's "
        "answer.",
    )
    judge_tokens: int | None = Field(
        None, gt=0, description="Most tokens of a judge's answer; null: policy.max_tokens."
    )
    reward_weight: float | None = Field(
        None,
        description="Add the reward of a verifier, a model or a judge, times this, to the env's; null: replace it.",
    )

    @property
    def scorer(self) -> str:
        """The option that replaces rewards; empty if none does."""
        return next((name for name in SCORERS if getattr(self, name)), "")

    def judge_policy(self, policy: Any) -> Any:
        """The options of the judge's model and engine; servers of policy.engine=http only serve the policy."""
        options: dict[str, Any] = {"value_head": False, "max_tokens": self.judge_tokens or policy.max_tokens}
        options |= {"tensor_parallel": 1}  # the judge has one GPU
        options |= {"engine": "transformers"} if policy.engine == "http" else {}
        if self.judge != "start":
            alone = ("lora_rank", "train_layers", "max_length")
            options |= {"pretrained": self.judge, "lora_config": {}, **dict.fromkeys(alone)}
            options |= {"system": None, "template_arguments": {}}
        return policy.model_copy(update=options)

    section = "roles."
    rules = (
        only_with("judge_prompt judge_says judge_tokens", {"judge": bool}),
        only_with("critic_lr", {"critic": True}),
        never_with("reward_weight", dict.fromkeys(SCORERS), "there is no other reward; leave it out, or set one"),
        *(
            never_with(one, {other: bool}, "one of them; a verifier beside it goes into env.rewards")
            for one, other in combinations(SCORERS, 2)
        ),
    )

    def conflicts(self) -> Iterator[str]:
        if self.judge and "{asked}" not in self.judge_prompt and "{answer}" not in self.judge_prompt:
            yield "roles.judge_prompt names neither {asked} nor {answer}: all answers would be judged alike"


class RunSection(Strict):
    one_of: ClassVar = ("env_steps", "iterations")
    section = "run."
    rules = (
        never_with("env_steps", {"iterations": bool}, "set one of them"),
        never_with({"env_steps": None}, {"iterations": None}, "set one, for example run.iterations=100"),
    )

    dir: LocalPath = Field(Path("runs"), description="Folder under which every run gets a folder of its own.")
    name: str | None = Field(None, description="First part of that folder's name; null: the recipe's name.")
    env_steps: int | None = Field(None, gt=0, description="Train for this many env steps, in whole iterations; or:")
    iterations: int | None = Field(None, gt=0, description="Train for this many iterations.")
    per_gpu: bool = Field(
        False,
        description="If GPUs simulate, env.num_envs and algo.minibatch_size are per GPU: a run on n GPUs takes n times "
        "both, and config.yaml holds the products.",
    )
    eval_every: int | None = Field(
        None, gt=0, description="Evaluate every this many iterations; null: only at the end."
    )
    save_every: int | None = Field(None, gt=0, description="Also save a checkpoint every this many iterations.")
    save_minutes: float | None = Field(
        5,
        gt=0,
        description="Save so often that a crash costs at most this many minutes of training, or one iteration if that "
        "is longer; more rarely if saving would take over 5% of the time. null: by save_every only. "
        "Evaluations and the end of the run always save.",
    )
    stop_s: float = Field(
        20,
        ge=0,
        description="Seconds after Ctrl-C or SIGTERM for a run to finish its rollout, before it is given up. What "
        "learners have learned is saved all the same.",
    )
    keep: int | None = Field(
        3,
        gt=0,
        description="Number of newest checkpoints to keep, besides the best by the run's evaluations and those "
        "evaluated by hand; null: all.",
    )
    start_from: PathOrRecipe | None = Field(
        None,
        description="Begin with this policy's weights instead of random ones: a run's folder, one of its checkpoints, "
        "a policy folder, or a recipe, which is trained first unless run.dir has a finished run of it. "
        "The policy's options must be the same.",
    )
    samples: int = Field(
        3,
        ge=0,
        description="Conversations of a language policy that each iteration adds to samples.jsonl and the report, long "
        "texts shortened; 0: none.",
    )
    trace: int = Field(5, ge=0, description="Number of iterations, from the start, that trace.json records in full.")

    log: Annotated[
        tuple[Annotated[str, AfterValidator(LOGGER_CLASSES.checked_name)], ...], BeforeValidator(one_or_several)
    ] = Field(
        ("tensorboard",),
        description="Curves besides metrics.jsonl: any of tensorboard, wandb, trackio, or a logger of an installed "
        "package. wandb sends nothing unless "
        "WANDB_MODE or WANDB_API_KEY ask for it, trackio nothing unless TRACKIO_SPACE_ID or TRACKIO_SERVER_URL do.",
    )

    @field_validator("name")
    @classmethod
    def _one_part_of_a_path(cls, name: str | None) -> str | None:
        if name is None:
            return name
        if (size := len(name.encode(errors="replace"))) > LONGEST_NAME:
            raise ValueError(f"has {size} bytes; {LONGEST_NAME} are allowed, since files are named after it")
        if not as_path(name).name.strip() or "/" in name or name.startswith("."):
            raise ValueError("should be a name without /; the folder around it is run.dir")
        return name


class PipelineSection(Strict):
    schedule: Literal["auto", "sync", "periodic", "async"] = Field(
        "sync",
        description="When an update begins. sync: when its batch is complete; periodic: with the first finished "
        "group, with the same result; async: while the next batches are collected with older weights; "
        "auto: periodic if a profile measured here predicts that it is faster, else sync.",
    )
    async_level: int = Field(
        1, gt=0, description="With schedule=async: how many versions the rollout's weights are behind the learner's."
    )
    stages: int = Field(
        1, gt=0, description="Parts of a sim worker's envs; one is simulated while the policy serves another."
    )
    granularity: int | None = Field(
        None,
        gt=0,
        description="Send parts of rollouts after every this many decisions, and groups of whole episodes when certain "
        "ones have this many decisions (tokens); learners on their own devices precompute the features of frozen "
        "encoders, and the reference's log-probs of whole episodes. null: whole rollouts or batches.",
    )
    merge_rows: int | None = Field(
        None,
        gt=0,
        description="Most env rows that a policy worker answers at once, if requests of several sims wait; 1: one "
        "request after the other. null: 64 with openvla, openvla_oft, pi0, pi05 and smolvla, else 1.",
    )
    merge_wait_s: float = Field(
        0.005, ge=0, le=10, description="Seconds that a request may wait for requests of other sims."
    )

    @property
    def lag(self) -> int:
        """Number of versions by which a rollout's weights are older than the learners' weights."""
        return self.async_level if self.schedule == "async" else 0

    @property
    def begins_early(self) -> bool:
        """True if learners add gradients while the batch is incomplete."""
        return self.schedule == "periodic"


USUAL_VIDEOS = 4  # default number for first episodes, and for failures


class EvaluationSet(Strict):
    """A data set that evaluations ask; what is null is as for other evaluations."""

    file: LocalPath = Field(description="Questions, as for env.name=math.")
    columns: dict[str, str] = Field({}, description="As env.columns.")
    questions: int | None = Field(None, gt=0, description="Ask only the first ones, up to this number.")
    samples: int | None = Field(None, gt=0, description="Answers to each question.")
    temperature: float | None = Field(None, ge=0, le=1, description="As eval.temperature.")
    top_p: float | None = Field(None, gt=0, le=1, description="As eval.top_p.")
    top_k: int | None = Field(None, ge=0, description="As eval.top_k.")
    min_p: float | None = Field(None, ge=0, lt=1, description="As eval.min_p.")
    max_tokens: int | None = Field(None, gt=0, description="Most tokens of an answer; null: policy.max_tokens.")

    rules = (never_with("top_p top_k min_p", {"temperature": 0}, "it takes the likeliest token; leave it out"),)


def _named_sets(values: Any) -> Any:
    """The sets with `{file: FILE}` in place of a plain file."""
    if not isinstance(values, dict):
        return values
    if odd := next((name for name in values if not re.fullmatch(r"[\w.-]+", str(name))), None):
        raise ValueError(f"{odd!r} names no set: letters, digits, _, - and dots; such as {{gsm8k: FILE}}")
    return {name: {"file": options} if isinstance(options, str) else options for name, options in values.items()}


class EvalSection(Strict):
    episodes: int = Field(
        50,
        gt=0,
        le=1_000_000,
        description="Number of episodes of an evaluation; one eval.seed always gives the same episodes.",
    )
    num_envs: int | None = Field(None, gt=0, description="Env rows for evaluations, in total; null: env.num_envs.")
    seed: int = Field(1, ge=0, lt=2**63, description="Determines the episodes, which training never plays.")
    protocol: str | None = Field(
        None, description="Evaluation protocol, by name and version, for example maniskill-v1; null: the env's own."
    )
    delay: int = Field(
        0,
        ge=0,
        le=100,
        description="Env steps from an observation to the first action from it; until then the robot goes on with the "
        "chunk before (policy.chunks). 0: the world waits for the policy.",
    )
    videos: int = Field(
        USUAL_VIDEOS,
        ge=0,
        description="Number of first episodes to record; 0: no videos at all. Text envs: number of transcripts that "
        "the report shows unfolded.",
    )
    failure_videos: int | None = Field(
        None,
        ge=0,
        description="Most videos of failures, which are played once more for the camera, after the results, unless "
        "they are among the first episodes. null: 4, or none if eval.videos is less. Text envs have none.",
    )

    @property
    def most_failure_videos(self) -> int:
        if self.failure_videos is None:
            return USUAL_VIDEOS if self.videos >= USUAL_VIDEOS else 0
        return self.failure_videos

    overlay: bool = Field(
        False, description="Write instruction, step, reward, return, value and success below the frames."
    )
    cameras: bool = Field(False, description="Show the policy's cameras beside the scene.")
    mosaic: bool = Field(False, description="Join all videos into one, mosaic.mp4, framed by outcome.")
    dataset: bool = Field(False, description="Write the episodes as a dataset in LeRobot's layout (needs pyarrow).")
    samples: int = Field(
        1,
        gt=0,
        description="Answers to each prompt of a text env, for avg@k and pass@k; eval.episodes counts them all.",
    )
    sets: Annotated[dict[str, EvaluationSet], BeforeValidator(_named_sets)] = Field(
        {},
        description="Data sets to ask instead of the env's held-out prompts, each by a name and with a file, or with "
        "settings of its own: {gsm8k: hf:openai/gsm8k:main:test, aime: {file: aime.jsonl, samples: 32, temperature: "
        "0.6, max_tokens: 8192}}. All of their questions are asked (not eval.episodes).",
    )
    interleave: bool = Field(
        False,
        description="Play evaluations during a run beside the next rollout, which uses the same weights, instead of "
        "before it. Results are the same (with vLLM up to rounding).",
    )
    reference: str | None = Field(
        None,
        description="A published model by its name in docs/published.md, such as openvla_oft: the results compare the "
        "rate with the published one, and name different settings.",
    )
    temperature: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Randomness of actions: 0 takes the best one, 1 samples as in training, 0.5 has half the noise. "
        "Text envs: logits are divided by it, and 0 takes the likeliest token.",
    )
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Text envs: draw from the smallest set of likeliest tokens whose probabilities sum to this.",
    )
    top_k: int = Field(0, ge=0, description="Text envs: draw from this many of the likeliest tokens; 0: from all.")
    min_p: float = Field(
        0.0, ge=0, lt=1, description="Text envs: never draw tokens less likely than this times the likeliest one."
    )


class CollectSection(Strict):
    episodes: int = Field(50, gt=0, description="Number of episodes; training and evaluation play different ones.")
    expert: Literal["scripted", "planner"] = Field(
        "scripted", description="Expert: our script, or ManiSkill's motion planner."
    )
    keep: Literal["successes", "all"] = Field("successes", description="Episodes that become demonstrations.")
    noise: float = Field(
        0.0,
        ge=0,
        description="Deviation of the noise on the played actions; the expert's own actions are recorded, so that "
        "demonstrations show how to recover.",
    )


def _readable(value: Any) -> str | dict[str, Any]:
    """Checks a placement: a mode, or a map from roles to devices. `placement.make_plan` applies it to a machine."""
    if isinstance(value, dict):
        try:
            parse_map(value, more=True)
        except PlacementError as err:
            raise PlacementError(f"{err}; try placement='{MAP_EXAMPLE}'") from None
        return value
    if value in MODES:
        return value
    close = difflib.get_close_matches(str(value), MODES, n=1)
    meant = f"did you mean placement={close[0]}?" if close else "try placement=auto."
    raise ValueError(f"neither a mode nor a map; {meant} Modes: {', '.join(MODES)}; a map: {MAP_EXAMPLE}")


PlacementConfig = Annotated[str | dict[str, str | dict[str, str]], BeforeValidator(_readable)]


class ClusterConfig(Strict):
    backend: Literal["auto", "inline", "local", "ray"] = Field(
        "auto",
        description="where hosts run: local = processes on this machine, inline = all in one process for debugging, "
        "ray = on a Ray cluster of one or more machines, auto = ray with an address or named nodes, otherwise local",
    )
    address: str | None = Field(
        None,
        description="host:port of a running Ray cluster to join, of which this machine is a node, or auto: the "
        "running cluster of this machine; unset: RAY_ADDRESS, as `ray job submit` sets it. Without an address "
        "backend=ray starts a cluster of the run's own on this machine",
    )
    start_s: float = Field(
        300.0, gt=0, description="Seconds in which Ray has to start on this machine, unless cluster.address is set."
    )
    machines: str | None = Field(
        None,
        description="Machines to plan for in a --dry-run instead of the present ones: 8xGPU, 4x8xH100, 16xCPU, or "
        "a YAML file (docs/placement.md).",
    )
    devices: tuple[str, ...] = Field(
        (), description="Hardware that placements can name besides cores and GPUs: arm:0, or node1/arm:0 of a cluster."
    )

    memory_gb: float | None = Field(
        None,
        gt=0,
        description="Memory limit of every device: roles that do not fit together take turns. null: a GPU's memory, no "
        "limit elsewhere.",
    )

    @property
    def joined(self) -> str | None:
        """The address of the Ray cluster that the run joins."""
        if self.address is not None or self.backend in ("inline", "local"):
            return self.address
        address = os.environ.get("RAY_ADDRESS", "")
        return (
            address if address == "auto" or ADDRESS.fullmatch(address) else None
        )  # http://... is for `ray job` itself

    @field_validator("devices")
    @classmethod
    def _one_device_each(cls, devices: tuple[str, ...]) -> tuple[str, ...]:
        for name in devices:
            match = HARDWARE.fullmatch(name)
            if not match or match["kind"] in ("cpu", "gpu", "fake"):
                raise ValueError(f"{name!r} should be a device of your own by kind and number, arm:0 for example")
        return devices


class FaultsConfig(Strict):
    timeout_s: float = Field(
        600.0,
        gt=0,
        description="Seconds without a sign of life from any awaited worker, after which replaceable workers are "
        "replaced, or else the run fails.",
    )
    max_restarts: int = Field(
        5, ge=0, description="How often a process of sim or policy workers may be restarted within faults.window_s."
    )
    window_s: float = Field(1800.0, gt=0, description="Seconds over which these restarts are counted.")
    hang_s: float = Field(
        180.0, gt=0, description="Seconds of silence after which a sim or policy worker is killed as hung."
    )

    def conflicts(self) -> Iterator[str]:
        if self.hang_s > self.timeout_s:
            yield (
                f"faults.hang_s={self.hang_s:g} is longer than faults.timeout_s={self.timeout_s:g}, after which the "
                f"run has failed already; try faults.hang_s={self.timeout_s / 2:g}"
            )
