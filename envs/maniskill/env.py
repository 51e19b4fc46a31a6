"""ManiSkill tasks from states and images, on the CPU or on ManiSkill's own GPU physics.

There are three backends: `cpu_batched` (many envs in one process, for tasks for which this is proven equal), `cpu`
(plain ManiSkill envs one after the other) and `cuda`. Rows are not reset automatically: `vector_env.py` lets a finished
row stand still, `player.py` keeps its final observation and begins the next episode. With every backend an
episode's initial state depends only on its own seed: ManiSkill draws from torch's global generator, so each row gets a
generator of its own.
"""

from __future__ import annotations

import fcntl
import math
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from embodied.core.arrays import host, tensor_of
from embodied.core.errors import ConfigError, EmbodiedError, in_a_line
from embodied.core.types import ActionSpec, Array, EnvSpec, EpisodeSpec, Observation
from embodied.core.vulkan_driver import ensure_vulkan, has_nvidia
from embodied.envs.capabilities import AS_TRAINED, CataloguedTask, EvaluationProtocol, Expert
from embodied.envs.maniskill import tasks
from embodied.envs.maniskill.bridge import TWINS, asset_folder, is_bridge, missing_bridge_assets, source_of
from embodied.envs.maniskill.config import ManiSkillConfig
from embodied.envs.own_modules import explain_errors, is_own
from embodied.envs.vector_env import ReplayedEnv, StepResult

NO_DRAWING = (
    "this GPU does not draw, since its driver lacks the graphics part; in a container start it with "
    "NVIDIA_DRIVER_CAPABILITIES=all"
)
ALONE = (
    "its initial states are drawn env by env, which costs a GPU milliseconds each: one call for all envs draws other "
    "numbers (docs/own_task.md)"
)
DOWNLOADS = "https://github.com/sapien-sim/physx-precompiled/releases/download"
GPU_ROWS = 128  # rows with images from which `auto` means a GPU: single envs on cores draw one after the other
PROOF_S = 60.0  # time limit of a training run for proving that batched physics is equal for its task
RULES = "every episode is played to the step limit, whatever happens; objects that a task draws are drawn anew"
TO_THE_END = {"on_success": "continue", "on_failure": "continue", "solver_iterations": None}
PROTOCOL = EvaluationProtocol("maniskill-v1", RULES, TO_THE_END)
BRIDGE_RULES = "the task's own initial states in turn, all of them before any twice; played to the step limit"


class ManiSkillEnv(ReplayedEnv):
    draws_on_gpus = True
    catalogue = "ManiSkill"
    other_folder = "MS_ASSET_DIR=folder with data/"

    def __init__(self, config: ManiSkillConfig, num_envs: int) -> None:
        config = self.resolve(config)
        self.envs = build(config, num_envs)
        self.batched = config.backend != "cpu"
        env = self.envs[0]
        low, high = tasks.action_bounds(env)
        self._scale, self._offset = (high - low) / 2, (high + low) / 2
        if is_bridge(config.task):
            metres, radians = config.action_units or (1.0, 1.0)
            self._scale = self.units = np.array([metres] * 3 + [radians] * 3 + [1.0], np.float32)
        self._on_device = [tensor_of(array, env.device) for array in (self._scale, self._offset)]
        with tasks.DRAWING:
            if self.batched:
                from embodied.envs.maniskill.cpu_batch import choose_drawing

                choose_drawing(env)
            info = env.reset(seed=0)[1]
        limit = config.max_episode_steps or tasks.find_task(config.task).max_episode_steps or 100
        seen = tasks.numbers(env, info, config)
        spec = EnvSpec(
            action=ActionSpec(len(low)),
            state_dim=int(seen["state"].shape[-1]),
            privileged_dim=int(seen["privileged"].shape[-1]) if config.privileged else None,
            images=dict.fromkeys(config.cameras, (*config.image_size, 3)),
            instruction=hasattr(env, "get_language_instruction"),
            max_episode_steps=limit,
            has_success="success" in info,
            control_hz=float(env.control_freq),
            backend=config.backend,
        )
        if config.cameras:
            from embodied.envs.maniskill.images import check_cameras

            check_cameras(env, config.cameras)
        super().__init__(config, num_envs, spec)
        for row in self.envs:
            self._prepare(row)
        self._numbers = {name: np.zeros((num_envs, value.shape[-1]), np.float32) for name, value in seen.items()}
        self._info_now: dict[str, Any] | None = None  # info of the batched env until its state is observed
        self._cameras: dict[int, Any] = {}
        self._overflows: Any = None
        if config.backend == "cuda":
            from embodied.envs.maniskill.gpu_memory import Overflows

            self._overflows = Overflows()

    @property
    def gives_tensors(self) -> bool:
        """True if observations, rewards and success stay on the simulator's device."""
        return self.config.backend == "cuda"

    def video_problem(self) -> str:
        return "" if self.envs[0].backend.render_device else NO_DRAWING

    def drawn_by(self) -> str:
        device = self.envs[0].backend.render_device
        return "" if device is None else device.name if device.is_cuda() else "lavapipe"

    def _reset_rows(self, rows: np.ndarray, episodes: list[EpisodeSpec]) -> Array | None:
        if self._overflows is not None:
            self._overflows.check(str(self.config.task), self.num_envs)
        if self.batched:
            from embodied.envs.maniskill.cpu_batch import begin_episodes

            seeds, states = ([getattr(spec, key) for spec in episodes] for key in ("seed", "init_state_id"))
            self._info_now = info = begin_episodes(self.envs[0], rows, seeds, states)
            self._choose_solver(rows, episodes)
            if not self.env_spec.has_success:
                return None
            return info["success"] if self.gives_tensors else host(info["success"])[rows]
        import torch

        success = np.zeros(len(rows), bool)
        for i, (row, episode) in enumerate(zip(rows, episodes, strict=True)):
            chosen = {"episode_id": torch.tensor([episode.init_state_id])} if episode.init_state_id >= 0 else {}
            with tasks.DRAWING:
                obs, info = self.envs[row].reset(seed=episode.seed, options=chosen)
            if info["reconfigure"]:
                self._cameras.pop(row, None)  # its scene no longer exists
                self._prepare(self.envs[row])
            self._keep_row(row, obs, info)
            success[i] = bool(info.get("success", False))
        self._choose_solver(rows, episodes)
        return success

    def _choose_solver(self, rows: np.ndarray, episodes: list[EpisodeSpec]) -> None:
        """How many iterations the contacts of these episodes are solved in."""
        if not self.config.changes_solver:
            return
        its_own = self.envs[0]._default_sim_config.scene_config.solver_position_iterations
        for row, episode in zip(rows.tolist(), episodes, strict=True):
            physics = self.envs[0].scene.px.systems[row] if self.batched else self.envs[row].scene.px
            robots = {link.articulation for link in physics.articulation_link_components}
            is_early = episode.index < self.config.solver_episodes
            for body in (*physics.rigid_dynamic_components, *robots):
                body.solver_position_iterations = self.config.solver_iterations if is_early else its_own

    def _step(self, actions: np.ndarray, active: np.ndarray) -> StepResult:
        if self.batched:
            return self._step_batch(actions, active)
        actions = (actions * self._scale + self._offset).astype(np.float32)
        rewards, failed, success = np.zeros(self.num_envs, np.float32), *np.zeros((2, self.num_envs), bool)
        for row in np.flatnonzero(active):
            obs, reward, _, _, info = self.envs[row].step(tasks.for_robots(self.envs[row], actions[row]))
            self._keep_row(row, obs, info)
            rewards[row] = float(reward)
            failed[row], success[row] = bool(info.get("fail", False)), bool(info.get("success", False))
        return StepResult(rewards, self._ends(failed), success if self.env_spec.has_success else None)

    def _step_batch(self, actions: np.ndarray, active: np.ndarray) -> StepResult:
        """ManiSkill's own step without an observation, which is needed only at the end of a chunk."""
        import torch

        env = self.envs[0]
        with torch.no_grad():
            if self.config.backend == "cpu_batched":
                env.scene.px.advance_only(np.flatnonzero(active).tolist())
            scale, offset = self._on_device
            wanted = tensor_of(actions, env.device).float() * scale + offset
            taken = env._step_action(tasks.for_robots(env, wanted))
            env._elapsed_steps += 1
            info = env.get_info()
            reward = env.get_reward(obs=None, action=taken, info=info)
        self._info_now = info
        given = (lambda tensor: tensor) if self.gives_tensors else host
        failed = given(info["fail"]) if "fail" in info else None
        success = given(info["success"]) if "success" in info else None
        return StepResult(given(reward), self._ends(failed), success)

    def _ends(self, failed: Array | None) -> Array:
        """Failures that end episodes; without failures no data leaves the device."""
        ends = failed is not None and self.config.on_failure == "terminate"
        return failed if ends else np.zeros(self.num_envs, bool)

    def _observe(self) -> Observation:
        if self._info_now is not None:
            import torch

            with torch.no_grad():
                seen = self._numbers_of(self.envs[0], self._info_now)
                as_kept = (lambda tensor: tensor) if self.gives_tensors else host
                self._numbers = {name: as_kept(array.float()) for name, array in seen.items()}
            self._info_now = None
        texts = {}
        if self.env_spec.instruction:
            texts["instruction"] = [text for env in self.envs for text in env.get_language_instruction()]
        if not self.gives_tensors:
            return {**{name: array.copy() for name, array in self._numbers.items()}, **texts}
        return {**self._numbers, **self._all_images(), **texts}

    def _numbers_of(self, env: Any, info: dict[str, Any]) -> dict[str, Any]:
        return tasks.numbers(env, info, self.config)

    def _keep_row(self, row: int, obs: Any, info: dict[str, Any]) -> None:
        """Keep the numbers of a plain env, which has already computed a full state."""
        whole = self.config.state == "full" and not self.config.relative_positions
        seen = {"state": obs} if whole else self._numbers_of(self.envs[row], info)
        for name, array in seen.items():
            self._numbers[name][row] = host(array)[0]

    def _prepare(self, env: Any) -> None:
        """Adjust a scene after ManiSkill has built it."""
        if self.config.fast_images:
            from embodied.envs.maniskill.images import simplify_meshes

            simplify_meshes(env)

    def _all_images(self) -> Observation:
        """The images of all rows at once, as a GPU draws them."""
        if not self.config.cameras:
            return {}
        from embodied.envs.maniskill.images import paint_all

        return {"images": paint_all(self.envs[0], self.config.cameras)}

    def _paint(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        from embodied.envs.maniskill.images import paint

        where = [(self.envs[0], row) if self.batched else (self.envs[row], 0) for row in rows.tolist()]
        seen = [paint(env, scene, self.config.cameras) for env, scene in where]
        return {camera: np.stack([images[camera] for images in seen]) for camera in self.config.cameras}

    def render_rows(self, rows: np.ndarray) -> np.ndarray:
        from embodied.envs.maniskill.images import video_frames

        if self.config.backend == "cuda":
            return host(self.envs[0].render_rgb_array())[rows]
        return video_frames(self.envs, self.batched, rows, self._cameras, self.config.video_size)

    def make_single(self, changes: dict[str, Any]) -> Any:
        """One plain env of ManiSkill's, with these options changed."""
        return build(self.config.model_copy(update=changes), 1)[0]

    def close_extras(self, **_: Any) -> None:
        for env in self.envs:
            env.close()

    # Mostly class methods, before an env is built: what a task needs, how it is planned and checked

    @classmethod
    def plays_together(cls, config: ManiSkillConfig) -> bool:
        return config.backend != "cpu"

    @classmethod
    def missing_files(cls, config: ManiSkillConfig, machine: Any) -> dict[str, str]:
        """Missing files of the bridge tasks; only ManiSkill knows the files of other tasks."""
        here = asset_folder(machine.environ)
        bridge_tasks = filter(is_bridge, cls.tasks(config))
        missing = [asset for task in bridge_tasks for asset in missing_bridge_assets(task, here, machine.exists)]
        return {asset: source_of(asset) for asset in missing}

    @classmethod
    def list_tasks(cls) -> dict[str, CataloguedTask]:
        ensure_vulkan()
        return {name: tasks.task_entry(name, spec) for name, spec in sorted(tasks.registered().items())}

    @classmethod
    def longest_episode(cls, config: ManiSkillConfig) -> int | None:
        return config.max_episode_steps or max(
            (tasks.BATCHED_TASKS.get(task, 0) for task in cls.tasks(config)), default=0
        )

    @classmethod
    def protocols(cls, config: ManiSkillConfig) -> tuple[EvaluationProtocol, ...]:
        states = {TWINS.get(task) for task in cls.tasks(config)}
        if len(states) > 1 or None in states:
            return PROTOCOL, AS_TRAINED
        return (
            EvaluationProtocol("bridge-v1", BRIDGE_RULES, TO_THE_END, stored_states=states.pop()),
            PROTOCOL,
            AS_TRAINED,
        )

    @classmethod
    def resolve(cls, config: ManiSkillConfig) -> ManiSkillConfig:
        backend = config.backend
        if backend == "auto":
            backend = "cpu_batched" if tasks.is_listed(config) else "cpu"
        return config.model_copy(update={"backend": backend, "control_mode": tasks.control_of(config)})

    @classmethod
    def proven(cls, config: ManiSkillConfig, proofs: Path) -> ManiSkillConfig:
        """The config with batched physics if there is a stored proof; refuses cpu_batched without a proof."""
        if config.backend not in ("cpu_batched", "auto") or not isinstance(config.task, str) or tasks.is_listed(config):
            return config
        from embodied.envs.maniskill.equality_proof import read_proof

        config = config.model_copy(update={"control_mode": tasks.control_of(config)})
        proof = read_proof(config, proofs)
        if proof and proof.equal:
            return config.model_copy(update={"backend": "cpu_batched"})
        if config.backend == "cpu_batched":
            state = (
                f"does not hold here: {proof.problem}"
                if proof
                else f"is not proven: {tasks.to_prove(config)} plays both"
            )
            other = f" or env.control_mode={tasks.BATCHED_CONTROLS[0]}" * (config.task in tasks.BATCHED_TASKS)
            raise ConfigError(
                f"env.backend=cpu_batched for {config.task} with env.control_mode={config.control_mode} {state}; "
                f"try env.backend=cpu{other}"
            )
        return config

    @classmethod
    def seek_proof(cls, config: ManiSkillConfig, proofs: Path, say: Callable[[str], object]) -> None:
        """For an unproven task, find out within PROOF_S whether batched physics is equal."""
        if config.backend != "auto" or not isinstance(config.task, str) or tasks.is_listed(config):
            return
        from embodied.envs.maniskill.equality_proof import prove_within, read_proof

        config = config.model_copy(update={"control_mode": tasks.control_of(config)})
        if read_proof(config, proofs):
            return
        say(
            f"physics     is a batch of {config.task} equal to single envs? It is played both ways once, for "
            f"{PROOF_S:g} s at most (env.backend=cpu: single envs without asking)"
        )
        proof = prove_within(PROOF_S, config, proofs)
        gain = f"; {proof.speedup:.1f} times as fast as single envs here" if proof.speedup else ""
        say(f"            {f'yes{gain}' if proof.equal else f'single envs are used: {proof.problem}'}")

    @classmethod
    def remarks(cls, config: ManiSkillConfig, proofs: Path) -> list[str]:
        """Remarks on changed step limits and on the cost of single envs."""
        lines = []
        task_limit = tasks.BATCHED_TASKS.get(config.task) or tasks.find_task(config.task).max_episode_steps
        if config.max_episode_steps not in (None, task_limit):
            its = f"the task's own limit is {task_limit}" if task_limit else "the task has no limit of its own"
            lines.append(f"episodes end after {config.max_episode_steps} env steps, by env.max_episode_steps; {its}")
        if config.solver_iterations:
            coarse = f"in the first {config.solver_episodes} episodes" if config.changes_solver else "while training"
            lines.append(
                f"contacts are solved in {config.solver_iterations} iterations {coarse} (env.solver_iterations); "
                "evaluations play the task's own physics"
            )
        if config.cameras and is_own(config.task):
            height, width = config.image_size
            lines.append(
                f"images are {height}x{width} pixels, whatever size the task gives its cameras (env.image_size)"
            )
        if config.backend == "cpu":
            from embodied.envs.maniskill.equality_proof import cost_of_single

            lines.append(cost_of_single(config, proofs))
        return lines

    @classmethod
    def rehearse(cls, config: ManiSkillConfig) -> None:
        """Build one env to check control modes and cameras, unless the task is listed."""
        plain = config.reward == "own" and not (config.cameras or config.modules or config.robot)
        if plain and tasks.is_listed(config):
            return
        with cls.explain_errors(config):
            with closing(cls(cls.plain_config(config), 1)) as made:
                made.try_out()

    @classmethod
    def on_cores(cls, config: ManiSkillConfig) -> ManiSkillConfig:
        return config.model_copy(update={"backend": "cpu"})

    @classmethod
    def on_gpus(cls, config: ManiSkillConfig) -> ManiSkillConfig | None:
        pays = config.cameras and config.num_envs >= GPU_ROWS
        is_open = config.backend == "auto" and config.renderer != "cores" and not config.elsewhere
        return config.model_copy(update={"backend": "cuda"}) if pays and is_open else None

    @classmethod
    def plain_config(cls, config: ManiSkillConfig) -> ManiSkillConfig:
        """The config with which ManiSkill itself plays the task."""
        return cls.resolve(config.model_copy(update={"backend": "cuda" if config.backend == "cuda" else "cpu"}))

    @classmethod
    def explain_errors(cls, config: ManiSkillConfig) -> AbstractContextManager[None]:
        return explain_errors(f"env.task={config.task}")

    @classmethod
    def prove(cls, config: ManiSkillConfig, proofs: Path) -> list[str]:
        """Compare batched with single envs, and store the result."""
        from embodied.envs.maniskill.equality_proof import figures, prove_equal

        config = config.model_copy(update={"control_mode": tasks.control_of(config)})
        proof, path = prove_equal(cls, config, proofs)
        gain = f"{proof.speedup:.1f} times as fast as single envs here" if proof.speedup else "not timed"
        if proof.equal:
            finding = f"batched equals single envs ({figures(proof.worst)}), {gain}; env.backend=auto uses it"
            return [finding, *[ALONE] * proof.drawn_alone, f"proof: {path}"]
        why = f"Batched physics is not used for this task: {proof.problem}; {gain}"
        return [
            f"single envs only. {why}",
            *[f"On a GPU (env.backend=cuda) {ALONE}"] * proof.drawn_alone,
            f"kept: {path}",
        ]

    def expert(self, kind: str = "scripted", tick: Callable[[], None] = lambda: None) -> Expert:
        if kind == "planner":
            from embodied.envs.maniskill.motion_planner import PlannerExpert

            return PlannerExpert(self, tick)
        if is_bridge(self.config.task):
            from embodied.envs.maniskill.bridge.bridge_expert import BridgeExpert

            return BridgeExpert(self)
        from embodied.envs.maniskill import experts

        if self.config.task in experts.SMALL_ARM:
            from embodied.envs.maniskill.small_arm import SmallArmExpert

            return SmallArmExpert(self)
        if self.config.task == experts.ROLLING:
            return experts.RollBallExpert(self)
        return experts.ManiSkillExpert(self)

    @classmethod
    def check_expert(cls, config: ManiSkillConfig, kind: str) -> None:
        config = cls.resolve(config)  # experts need the control mode
        if kind == "planner":
            from embodied.envs.maniskill.motion_planner import PlannerExpert

            PlannerExpert.check(config)
        elif not all(is_bridge(task) for task in cls.tasks(config)):
            from embodied.envs.maniskill.experts import ManiSkillExpert

            ManiSkillExpert.check(config)

    def facts(self) -> dict[str, str]:
        return tasks.facts(self.envs[0], self.config)

    @classmethod
    def check(cls, config: ManiSkillConfig) -> None:
        ensure_vulkan()
        for task in cls.tasks(config):
            if task not in tasks.BATCHED_TASKS or config.robot or config.modules:
                tasks.check_choices(config.model_copy(update={"task": task}))


def draws_on_gpu(config: ManiSkillConfig) -> bool:
    """True if this process can render on a GPU; SAPIEN uses the GPU that CUDA sees. Containers often lack the driver's
    graphics part; images are then rendered on cores."""
    return config.renderer != "cores" and bool(os.environ.get("EMBODIED_RENDER")) and has_nvidia()


def gpu_draws() -> bool:
    """True if the simulator's GPU can render: its driver may support computing only."""
    import sapien

    try:
        return sapien.Device("cuda").can_render()
    except RuntimeError:  # without a GPU ManiSkill raises its own error later
        return False


def load_gpu_physics() -> None:
    """Loads PhysX's library for GPUs. SAPIEN downloads it on first use, so one process loads it at a time."""
    import sapien.physx

    version = sapien.physx.version()
    folder = Path.home() / ".sapien" / "physx" / version
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            sapien.physx.enable_gpu()
        except (OSError, BadZipFile) as err:
            if (folder / "libPhysXGpu_64.so").exists():
                raise
            raise EmbodiedError(
                f"env.backend=cuda: PhysX's library for GPUs is not in {folder}, and SAPIEN cannot download it: "
                f"{in_a_line(err)}; unzip {DOWNLOADS}/{version}/linux-so.zip there, fetched where there is a network; "
                "or try env.backend=cpu"
            ) from None


def render_backend(config: ManiSkillConfig) -> str:
    """ManiSkill's name of the render device; none for states on a GPU that cannot render."""
    if config.backend != "cuda":
        return "gpu" if draws_on_gpu(config) else "cpu"
    if gpu_draws():
        return "gpu"
    if config.cameras:
        raise EmbodiedError(f"env.cameras with env.backend=cuda: {NO_DRAWING}, or try env.backend=cpu")
    return "none"


def build(config: ManiSkillConfig, num_envs: int) -> list[Any]:
    """One batched env, or `num_envs` plain ones."""
    ensure_vulkan(on_cores=config.renderer == "cores")
    room: AbstractContextManager[None] = nullcontext()
    if config.backend == "cuda":
        from embodied.envs.maniskill.gpu_memory import gpu_capacities

        load_gpu_physics()
        room = gpu_capacities(num_envs, config.gpu_memory)
    draws = render_backend(config)
    height, width = config.image_size
    view = {"height": height, "width": width} if config.cameras else {}
    if config.image_fov is not None and config.image_region:
        from embodied.envs.maniskill.images import of_square

        view |= {"fov": None, "intrinsic": of_square(height, width, config.image_region, config.image_fov)}
    elif config.image_fov is not None:
        view["fov"] = math.radians(config.image_fov)
    solver = {"scene_config": {"solver_position_iterations": config.solver_iterations}}
    with tasks.quiet(), tasks.DRAWING, room:

        def make(num_envs: int = 1) -> Any:
            try:
                return tasks.maker(config.task)(
                    num_envs=num_envs,
                    obs_mode="state" if config.state == "full" else "none",
                    control_mode=config.control_mode,
                    reward_mode=config.reward_mode,
                    sim_backend="physx_cuda" if config.backend == "cuda" else "physx_cpu",
                    render_backend=draws,
                    sensor_configs=view,
                    human_render_camera_configs={"shader_pack": config.shader, **view},
                    **({"robot_uids": config.robot} if config.robot else {}),
                    **({"sim_config": solver} if config.solver_iterations else {}),
                    **({"object_set": config.object_set} if config.object_set else {}),
                    **({"image_region": config.image_region} if is_bridge(config.task) and config.image_region else {}),
                )
            except (AssertionError, NotImplementedError) as err:  # raised by ManiSkill for options that a task lacks
                raise tasks.refused(config, err) from None

        tasks.check_choices(config)
        if config.backend == "cpu_batched":
            from embodied.envs.maniskill.cpu_batch import make_batched

            listed = config.task in tasks.BATCHED_TASKS
            planes = not listed or config.task in tasks.ROLLING
            return [make_batched(make, num_envs, partial(tasks.numbers, config=config), trimmed=listed, planes=planes)]
        if config.backend == "cuda":
            return [make(num_envs).unwrapped]
        return [make().unwrapped for _ in range(num_envs)]
