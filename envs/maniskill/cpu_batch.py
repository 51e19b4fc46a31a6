"""Builds a ManiSkill env whose batched code runs on N CPU scenes in one process, and draws its rows' initial states.

ManiSkill refuses more than one env per process on a CPU, although its batched code would work. While an env is built,
some names in its modules are replaced, so that it gets `BatchedCpuPhysics` instead of the GPU's physics. Lazy lookups
are triggered before the names are restored.

ManiSkill draws initial states with `torch.rand`, `torch.randint` and `numpy.random.RandomState.normal`. All are
Mersenne Twisters with the same words for a seed. Building two generators per row takes 150 us; computing the words of
all rows together takes about a microsecond per row. The numbers equal the generators' bit for bit.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import cached_property, partial
from typing import Any

import numpy as np
import sapien
import torch
from mani_skill.agents.controllers.utils.kinematics import Kinematics
from mani_skill.envs import sapien_env
from mani_skill.envs.scene import ManiSkillScene
from mani_skill.envs.utils import randomization
from mani_skill.envs.utils.randomization.batched_rng import BatchedRNG
from mani_skill.envs.utils.randomization.samplers import UniformPlacementSampler
from mani_skill.render.utils import can_render
from mani_skill.utils.building.actor_builder import ActorBuilder
from mani_skill.utils.geometry.rotation_conversions import (
    euler_angles_to_matrix,
    matrix_to_quaternion,
    quaternion_multiply,
)
from mani_skill.utils.structs.articulation import Articulation
from mani_skill.utils.structs.articulation_joint import ArticulationJoint
from mani_skill.utils.structs.pose import Pose, to_sapien_pose
from scipy.special import xlogy
from torch.overrides import TorchFunctionMode

from embodied.envs.maniskill.bridge import PLATES, TWINS
from embodied.envs.maniskill.cpu_physics import BatchedCpuPhysics, Rows
from embodied.envs.maniskill.tasks import DRAWING, action_bounds, for_robots

BETWEEN_STEPS = ("_before_simulation_step", "_after_simulation_step")  # a task's code between physics steps
RigidBody = sys.modules["mani_skill.utils.structs.base"].PhysxRigidBodyComponentStruct


def make_batched(make, num_envs: int, look, trimmed: bool = True, planes: bool = False) -> Any:
    """Returns the env built by `make(num_envs=...)`, unwrapped and reset once; `look(env, info)` observes it.
    `trimmed`: fetch only the values that the first steps read, for tasks that read the same values in all steps.
    `planes`: as in `replaced_names`."""
    with replaced_names(planes):
        env = make(num_envs=num_envs).unwrapped
        env.reset(seed=0)
        physics = env.scene.px
        if trimmed:
            physics.watch()
        action = for_robots(env, torch.zeros((num_envs, len(action_bounds(env)[0]))))
        for _ in range(2):  # triggers all lazy lookups by running a rollout's code
            look(env, env.step(action)[-1])
        env.reset(seed=0, options={"env_idx": torch.arange(num_envs)})
        if trimmed:
            physics.fetch_only_read()
    return env


@contextmanager
def replaced_names(planes: bool) -> Iterator[None]:
    """Inside, names are replaced. `planes`: put the ground into every scene. ManiSkill puts it only into the first
    scene, since scenes share it on a GPU; most listed tasks play on a table and never touch the ground."""
    changes = [
        (sapien.physx, "PhysxGpuSystem", BatchedCpuPhysics),
        (sapien_env, "CPU_SIM_BACKENDS", frozenset()),
        (sapien_env.BaseEnv, "_setup_scene", setup_scene),
        (RigidBody, "_body_data_index", named(cached_property(body_rows), "_body_data_index")),
        (Articulation, "_data_index", named(cached_property(articulation_rows), "_data_index")),
        (ArticulationJoint, "_data_index", named(cached_property(joint_rows), "_data_index")),
        (Kinematics, "_setup_cpu", solve_row_by_row),
    ]
    if planes:
        changes.append((ActorBuilder, "__init__", init_with_planes))
    before = [(owner, name, vars(owner)[name]) for owner, name, _ in changes]
    try:
        for owner, name, value in changes:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


INIT = ActorBuilder.__init__


def init_with_planes(builder: Any) -> None:
    INIT(builder)
    builder.set_allow_overlapping_plane_collisions(True)


def setup_scene(env: Any) -> None:
    """Replaces BaseEnv._setup_scene: a CPU scene for every env, and one physics system over them all."""
    env._set_scene_config()
    scenes = []
    for _ in range(env.num_envs):
        systems: list[Any] = [sapien.physx.PhysxCpuSystem()]
        if can_render(env._render_device):
            systems.append(sapien.render.RenderSystem(env._render_device))
        scenes.append(sapien.Scene(systems))
    scene = ManiSkillScene(
        scenes, sim_config=env.sim_config, device=env.device, parallel_in_single_scene=False, backend=env.backend
    )
    scene.px = BatchedCpuPhysics(scenes)
    scene.gpu_sim_enabled = True
    scene.px.timestep = 1.0 / env._sim_freq
    scene.px.puts_off = all(getattr(type(env), name) is getattr(sapien_env.BaseEnv, name) for name in BETWEEN_STEPS)
    env.scene = scene


SETUP_KINEMATICS = Kinematics._setup_cpu


def solve_row_by_row(kinematics: Kinematics) -> None:
    """Use a single env's inverse kinematics on a CPU, row by row: if a pose is out of reach, the arm does not move.
    ManiSkill's batched solver would take an unlimited step towards the pose."""
    SETUP_KINEMATICS(kinematics)
    kinematics.compute_ik = partial(compute_ik, kinematics)


def compute_ik(
    kinematics: Kinematics,
    pose: Any,
    q0: torch.Tensor,
    is_delta_pose: bool = False,
    current_pose: Any = None,
    solver_config: Any = None,
) -> torch.Tensor:
    """Joint positions [N, J] that bring the hand to a pose, or by a movement [N, 6] from its current pose."""
    if is_delta_pose:
        turn = matrix_to_quaternion(euler_angles_to_matrix(pose[:, 3:], "XYZ"))
        pose = Pose.create_from_pq(current_pose.p + pose[:, :3], quaternion_multiply(turn, current_pose.q))
    solution = q0[:, kinematics.active_joint_indices].clone()
    starts = q0[:, kinematics.pmodel_active_joint_indices].numpy()
    for row, start in enumerate(starts):
        joints, solved, _ = kinematics.pmodel.compute_inverse_kinematics(
            kinematics.end_link_idx,
            to_sapien_pose(pose.raw_pose[row]),
            initial_qpos=start,
            active_qmask=kinematics.qmask,
            max_iterations=100,
        )
        if solved:
            solution[row] = torch.from_numpy(joints[kinematics.pmodel_controlled_joint_indices])
    return solution


def body_rows(struct: Any) -> torch.Tensor:
    return torch.tensor([struct.px.body_index[id(body)] for body in struct._bodies])


def articulation_rows(struct: Any) -> torch.Tensor:
    return torch.tensor([struct.px.articulation_index[id(a)] for a in struct._objs], dtype=torch.int32)


def joint_rows(struct: Any) -> torch.Tensor:
    rows = [struct.scene.px.articulation_index[id(a)] for a in struct._physx_articulations]
    return torch.tensor(rows, dtype=torch.int32)


def named(prop: cached_property, name: str) -> cached_property:
    prop.__set_name__(None, name)
    return prop


# Resets of some rows, each from its own seed.
#
# ManiSkill's reset seeds one generator for all rows that it resets together. Here every row has its own seed and gets
# the same draws as a single env with that seed; the rest is done once for all rows. If a task draws for all rows in one
# call, it gets the rows' own draws stacked.

# Tasks whose rows drawn in one call get what each gets alone; other tasks are tried when they are built.
DRAWN_TOGETHER = (
    *("PushCube-v1", "PullCube-v1", "PickCube-v1", "LiftPegUpright-v1", "PlaceSphere-v1", "RollBall-v1"),
    *("PokeCube-v1", "StackCube-v1", "PullCubeTool-v1", "PegInsertionSide-v1", *TWINS),
)
TRIED_ROWS, TRIALS = 16, 4
WRITTEN = ("rigid_body_data", *(f"articulation_{name}" for name in ("qpos", "qvel", "target_qpos", "target_qvel")))


@torch.no_grad()
def begin_episodes(env: Any, rows: np.ndarray, seeds: list[int], states: list[int]) -> dict[str, Any]:
    """Reset these rows, to a task's stored states if `states` are not -1; returns ManiSkill's info of all rows."""
    scene, physics = env.scene, env.scene.px
    on_cpu = isinstance(physics, BatchedCpuPhysics)
    chosen = Rows.of(rows, env.device)
    scene._reset_mask = chosen
    env._elapsed_steps[chosen] = 0
    if on_cpu:
        physics.refresh(rows.tolist())
    stand_still(env)
    env.agent.reset()
    initialize(env, rows, seeds, states)
    scene._reset_mask = chosen
    scene._gpu_apply_all()
    if on_cpu:  # only these rows changed
        physics.refresh(rows.tolist())
        physics.hide_unread(rows.tolist())
        scene._needs_fetch = False
    else:
        physics.gpu_update_articulation_kinematics()
        scene._gpu_fetch_all()
    controllers = env.agent.controller.values() if isinstance(env.agent.controller, dict) else [env.agent.controller]
    for controller in controllers:
        controller.reset()  # of these rows: other rows keep their targets
    scene._reset_mask = env.every_row
    return env.get_info()


def initialize(env: Any, rows: np.ndarray, seeds: list[int], states: list[int]) -> None:
    stored = [state >= 0 for state in states]
    if env.draws_together and all(stored) == any(stored):
        initialize_together(env, rows, seeds, states)
    else:
        initialize_one_by_one(env, rows, seeds, states)


def choose_drawing(env: Any) -> None:
    """Find out how a new env's initial states are drawn. The env has to be reset afterwards."""
    is_drawn_together = env.spec.id in DRAWN_TOGETHER or env.spec.id.startswith(PLATES)
    env.every_row = env.scene._reset_mask
    if is_drawn_together and not isinstance(
        env.scene.px, BatchedCpuPhysics
    ):  # a mask makes a GPU wait, other tasks may need one
        env.every_row = Rows.of(np.arange(env.num_envs), env.device)
    env.draws_together = is_drawn_together or draws_together(env)


def draws_together(env: Any) -> bool:
    """True if rows drawn in one call get what each row gets alone, bit for bit: tried with several seeds, since a task
    may draw until something is free."""
    rows, mask = np.arange(min(env.num_envs, TRIED_ROWS)), env.scene._reset_mask
    found = []
    for way in (initialize_together, initialize_one_by_one):
        with suppress(Exception):
            for trial in range(TRIALS):
                env.scene._reset_mask = Rows.of(rows, env.device)
                way(env, rows, [TRIED_ROWS * trial + row for row in rows.tolist()], [-1] * len(rows))
                found.append(drawn_state(env, rows))
    env.scene._reset_mask = mask
    return len(found) == 2 * TRIALS and all(map(np.array_equal, found[:TRIALS], found[TRIALS:]))


def drawn_state(env: Any, rows: np.ndarray) -> np.ndarray:
    """All numbers that an initialization may have written: of the physics, and the env's own with a row per env."""
    physics, count = env.scene.px, env.num_envs
    arrays = [getattr(physics, f"cuda_{name}").torch() for name in WRITTEN]
    tensors = [value for _, value in sorted(vars(env).items()) if type(value) is torch.Tensor and len(value.shape)]
    arrays += [value[rows] for value in tensors if len(value) == count]
    return np.concatenate([np.nan_to_num(array.cpu().numpy().astype(np.float64), nan=7.0).ravel() for array in arrays])


def initialize_together(env: Any, rows: np.ndarray, seeds: list[int], states: list[int]) -> None:
    """The same draws as `initialize_one_by_one`, in one call of the task's code, with the scene's mask as `Rows`."""
    draws, before = EpisodeDraws(np.array(seeds)), (env._episode_rng, env._batched_episode_rng)
    env._episode_seed[rows] = seeds
    env._episode_rng = RowsOfNormals(draws)
    env._batched_episode_rng = None  # such a task draws nothing from generators of single rows
    options = {"episode_id": torch.tensor(states)} if states[0] >= 0 else {}
    try:
        with replaced_draws(RowsOfUniforms(draws, env.device)):
            env._initialize_episode(env.scene._reset_mask.as_subclass(torch.Tensor), options)
    finally:
        env._episode_rng, env._batched_episode_rng = before


def initialize_one_by_one(env: Any, rows: np.ndarray, seeds: list[int], states: list[int]) -> None:
    with own_draws(env.device) as seed_draws:
        for row, seed, state in zip(rows.tolist(), seeds, states, strict=True):
            env.scene._reset_mask = torch.arange(env.num_envs, device=env.device) == row
            rng = BatchedRNG.from_seeds([seed], backend=env._batched_rng_backend)
            env._episode_seed[row] = seed
            env._batched_episode_rng[np.array([row])] = rng
            env._episode_rng = rng[0]
            seed_draws(seed)
            options = {"episode_id": torch.tensor([state])} if state >= 0 else {}
            env._initialize_episode(torch.tensor([row], device=env.device), options)


@contextmanager
def replaced_draws(rand: RowsOfUniforms) -> Iterator[None]:
    places = type("RowsOfPlaces", (RowsOfPlaces,), {"rand": rand})
    with DRAWING, ExitStack() as stack:
        for owner, name, value in (
            (torch, "rand", rand.rand),
            (torch, "randint", rand.randint),
            (randomization, "UniformPlacementSampler", places),
        ):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield


@contextmanager
def own_draws(device: torch.device) -> Iterator[Callable[[int], Any]]:
    """Yields a function that seeds torch's generator on the host, from which all draws come inside; afterwards the
    generator is restored."""
    with DRAWING, nullcontext() if device.type == "cpu" else DrawsOnCpu():
        before = torch.default_generator.get_state()
        try:
            yield torch.default_generator.manual_seed  # torch.manual_seed would look for GPUs: 0.5 ms
        finally:
            torch.default_generator.set_state(before)


DRAWS = ("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "normal", "multinomial", "bernoulli")
DRAWS += ("uniform_", "normal_", "random_", "exponential_", "bernoulli_")


class DrawsOnCpu(TorchFunctionMode):
    """Random numbers for a GPU are drawn on the host and sent, so that a seed gives the same numbers as on cores."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        given = [value for value in args if isinstance(value, torch.Tensor)]
        device = kwargs.get("device") or (given[0].device if given else None)
        if name not in DRAWS or device is None:
            return func(*args, **kwargs)
        there = {"device": "cpu"} if "device" in kwargs else {}
        drawn = func(*(value.cpu() if isinstance(value, torch.Tensor) else value for value in args), **kwargs | there)
        return given[0].copy_(drawn) if name.endswith("_") else drawn.to(device)


def stand_still(env: Any) -> None:
    """Zero the velocities of the rows in the mask; applied together with their new poses."""
    zero = torch.zeros(3, device=env.device)
    for actor in env.scene.actors.values():
        if actor.px_body_type == "dynamic":
            actor.set_linear_velocity(zero)
            actor.set_angular_velocity(zero)
    for articulation in env.scene.articulations.values():
        articulation.set_qvel(torch.zeros(articulation.max_dof, device=env.device))
        articulation.set_root_linear_velocity(zero)
        articulation.set_root_angular_velocity(zero)


FEW_ROWS = 200  # with fewer rows, reseeding a generator for each row is faster
STATE, SHIFT = 624, 397  # words of a Mersenne Twister's state, and the offset at which it mixes them
WORDS = STATE - SHIFT  # number of first words that depend only on the initial state
SPARE_PAIRS = 7  # extra attempts at pairs of normal numbers; about one row in 1,000 needs more
SEEDED_ANEW = np.random.RandomState(0)  # with each row's seed before it draws: a new one takes 100 us
LARGE = 1 << 28  # from here on torch draws whole numbers from two words each
# Arrays without axes, which NumPy takes faster than its scalars
THIRTY, FACTOR, *NUMBERS = (np.array(number, np.uint32) for number in (30, 1812433253, *range(STATE)))


class EpisodeDraws:
    """Random numbers of rows with these seeds: row i's numbers equal a generator's with seed `seeds[i]`."""

    def __init__(self, seeds: np.ndarray) -> None:
        self.seeds = np.asarray(seeds, np.uint32)
        self._state = (np.empty((0, len(self.seeds)), np.uint32),) * 2

    def words(self, count: int) -> np.ndarray:
        """The first numbers of 32 bits of each row: uint32 [rows, count]."""
        if len(self.seeds) >= FEW_ROWS and count <= WORDS:
            return twister_words(*self.state(0, count)).T
        words = np.empty((len(self.seeds), count), np.uint32)
        for row, seed in enumerate(self.seeds.tolist()):
            SEEDED_ANEW.seed(seed)
            words[row] = SEEDED_ANEW.randint(0, 2**32, count, np.uint32)
        return words

    def normals(self, count: int) -> np.ndarray:
        """The first `RandomState(seed).normal(size=count)` of each row: float64 [rows, count]."""
        pairs = -(-count // 2)
        attempts = pairs + SPARE_PAIRS
        if len(self.seeds) < FEW_ROWS or 4 * attempts > WORDS:
            return normals_one_by_one(self.seeds, count)
        rows = np.arange(len(self.seeds))
        points = np.empty(len(rows) * pairs, np.complex128)
        places = rows * pairs  # of the next point of each row, which replaces a rejected one
        self.state(0, 4 * attempts)  # of all attempts at once
        for attempt in range(attempts):
            state = self.state(4 * attempt, 4 * attempt + 4)
            if attempt >= pairs:
                unfinished = places < (rows + 1) * pairs
                rows, places = rows[unfinished], places[unfinished]
                state = [array.take(rows, axis=1) for array in state]
            points[places], accepted = points_in_square(twister_words(*state))
            places += accepted
        numbers = normals_of(points).reshape(-1, 2 * pairs)[:, :count]
        lacking = rows[places < (rows + 1) * pairs]
        numbers[lacking] = normals_one_by_one(self.seeds[lacking], count)
        return numbers

    def state(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """The arguments of `twister_words` for words `start` to `stop` of each row."""
        if len(self._state[1]) < stop:
            self._state = twister_state(self.seeds, stop)
        first, later = self._state
        return first[start : stop + 1], later[start:stop]


def normals_one_by_one(seeds: np.ndarray, count: int) -> np.ndarray:
    numbers = np.empty((len(seeds), count))
    for row, seed in enumerate(seeds.tolist()):
        SEEDED_ANEW.seed(seed)
        numbers[row] = SEEDED_ANEW.normal(size=count)
    return numbers


def points_in_square(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A point of each row, whose coordinates are in [-1, 1), from four words: complex [rows]; and if it is accepted."""
    high, low = (words[0::2] >> np.uint32(5)).view(np.int32), (words[1::2] >> np.uint32(6)).view(np.int32)
    points = np.empty(words.shape[1], np.complex128)
    # The generators return the second coordinate's number first.
    points.imag, points.real = (high * 67108864.0 + low) * (2.0 / 9007199254740992.0) - 1.0
    radius = squared_radius(points)
    return points, (radius < 1.0) & (radius != 0.0)


def squared_radius(points: np.ndarray) -> np.ndarray:
    return points.real * points.real + points.imag * points.imag


def normals_of(points: np.ndarray) -> np.ndarray:
    """Two normal numbers from each point in the unit circle, by the polar method: float64 [points, 2]."""
    with np.errstate(all="ignore"):  # rows without enough points have memory's old content
        radius = squared_radius(points)
        logs = xlogy(1.0, radius)  # the C library's log, as in the generators; NumPy's differs in the last bit
        return points.view(np.float64).reshape(-1, 2) * np.sqrt(-2.0 * logs / radius)[:, None]


def twister_state(seeds: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The part of the initial states that the first `count` words, at most WORDS, depend on: words 0 to `count`, and
    `count` words from SHIFT on, both uint32 [words, rows]."""
    block = np.empty((2 * count + 3, len(seeds)), np.uint32)  # one array: separate arrays were twice as slow
    first, later, (passed, mixed) = block[: count + 1], block[count + 1 : -2], block[-2:]
    state = [*first, *[passed] * (SHIFT - count - 1), *later]
    first[0] = seeds
    for last, following, number in zip(state, state[1:], NUMBERS[1:], strict=False):
        np.right_shift(last, THIRTY, mixed)
        np.bitwise_xor(mixed, last, mixed)
        np.multiply(mixed, FACTOR, mixed)
        np.add(mixed, number, following)
    return first, later


def twister_words(first: np.ndarray, later: np.ndarray) -> np.ndarray:
    """The words that Mersenne Twisters give first, from parts of their initial states: uint32 [words, rows]."""
    joined = (first[:-1] & np.uint32(0x80000000)) | (first[1:] & np.uint32(0x7FFFFFFF))
    words = later ^ (joined >> np.uint32(1)) ^ (joined & np.uint32(1)) * np.uint32(0x9908B0DF)
    words ^= words >> np.uint32(11)
    words ^= (words << np.uint32(7)) & np.uint32(0x9D2C5680)
    words ^= (words << np.uint32(15)) & np.uint32(0xEFC60000)
    return words ^ words >> np.uint32(18)


class RowsOfUniforms:
    """Replaces `torch.rand` and `torch.randint`: row i of each tensor comes from row i's own stream, on any device."""

    def __init__(self, draws: EpisodeDraws, device: torch.device) -> None:
        self.draws, self.device = draws, device
        self.num_drawn = np.zeros(len(draws.seeds), np.int64)  # words drawn by each row
        self.words = np.empty((len(draws.seeds), 0), np.uint32)  # of each row's stream, as far as known

    def rand(self, *size: Any, **options: Any) -> torch.Tensor:
        size = options.get("size", size)
        shape = torch.Size(size if len(size) != 1 or isinstance(size[0], int) else size[0])
        check_rows(shape, self.draws)
        assert not options.keys() - {"size", "device"}, f"torch.rand with {options}"
        drawn = self.uniforms(np.arange(shape[0]), shape[1:].numel())
        return drawn.reshape(shape).to(options.get("device") or self.device)

    def randint(self, *limits_and_size: Any, **options: Any) -> torch.Tensor:
        *limits, size = [*limits_and_size, *([options["size"]] if "size" in options else [])]
        low, high = limits if len(limits) == 2 else (0, *limits)
        check_rows(size, self.draws)
        assert high - low < LARGE and not options.keys() - {"size", "device"}, f"torch.randint with {options}"
        words = self.next_words(np.arange(size[0]), math.prod(size[1:]))
        drawn = torch.from_numpy(low + (words % np.uint32(high - low)).astype(np.int64))
        return drawn.reshape(size).to(options.get("device") or self.device)

    def uniforms(self, rows: np.ndarray, count: int) -> torch.Tensor:
        """The next numbers of these rows: float32 [len(rows), count], on the CPU."""
        words = self.next_words(rows, count) & np.uint32(2**24 - 1)
        return torch.from_numpy(words.astype(np.float32) * np.float32(2.0**-24))

    def next_words(self, rows: np.ndarray, count: int) -> np.ndarray:
        first = self.num_drawn[rows]
        if (needed := int(first.max(initial=0)) + count) > self.words.shape[1]:
            self.words = self.draws.words(max(needed, 2 * self.words.shape[1]))
        self.num_drawn[rows] += count
        if (first == first[:1]).all() and len(rows) == len(self.words):
            return self.words[:, first[0] : needed]
        return self.words[rows[:, None], first[:, None] + np.arange(count)]


class RowsOfPlaces(UniformPlacementSampler):
    """Replaces ManiSkill's sampler of places: each row draws until its own place is free, as when it is alone.
    ManiSkill's draws for all rows until all are free, and takes the last free place."""

    rand: RowsOfUniforms  # set by a subclass

    def __init__(self, bounds: Any, batch_size: int, device: Any = None) -> None:
        super().__init__(bounds, batch_size, "cpu")
        self.fixtures = torch.empty((0, batch_size, self._bounds.shape[1]), device="cpu")
        self.radii: list[float] = []

    def sample(self, radius: Any, max_trials: int, append: bool = True, verbose: bool = False) -> torch.Tensor:
        left, places = np.arange(self.batch_size), torch.zeros(self.fixtures.shape[1:], device="cpu")
        radius = torch.as_tensor(radius, dtype=torch.float32).cpu()
        for _ in range(max_trials if len(self.radii) else 1):
            drawn = self.rand.uniforms(left, places.shape[1]) * self._ranges + self._bounds[0]
            distance = torch.linalg.norm(drawn - self.fixtures[:, left], axis=-1)
            free = (distance > (torch.tensor(self.radii, device="cpu") + radius)[:, None]).all(dim=0)
            places[left[free.numpy()]] = drawn[free]
            left = left[~free.numpy()]
            if not len(left):
                break
        if append:
            self.fixtures = torch.cat([self.fixtures, places[None]])
            self.radii.append(float(radius))
        return places.to(self.rand.device)


class RowsOfNormals:
    """Replaces a numpy generator: row i of each array comes from row i's own stream."""

    def __init__(self, draws: EpisodeDraws) -> None:
        self.draws = draws
        self.num_drawn = 0  # numbers drawn by each row

    def normal(self, mean: float, deviation: float, size: tuple[int, ...]) -> np.ndarray:
        check_rows(size, self.draws)
        first, self.num_drawn = self.num_drawn, self.num_drawn + math.prod(size[1:])
        return mean + deviation * self.draws.normals(self.num_drawn)[:, first:].reshape(size)


def check_rows(shape: tuple[int, ...], draws: EpisodeDraws) -> None:
    assert shape[0] == len(draws.seeds), f"a draw of shape {list(shape)} for {len(draws.seeds)} rows"
