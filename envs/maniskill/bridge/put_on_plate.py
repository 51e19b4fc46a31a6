"""PutOnPlate-25: put one of 25 objects on one of 17 plates, before one of 21 photographs of tables. `Variant`s of the
training task differ from it in one property each, and test generalisation.

An episode is a number whose digits choose object, plate, photograph, places and so on; the last digit, the object's
rotation, changes fastest. Places are points of a grid on the table, in metres. All objects that a task may draw are in
the scene; unused ones lie behind the camera.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import product
from math import dist, prod
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import sapien
import torch
from mani_skill import ASSET_DIR
from mani_skill.envs.sapien_env import BaseEnv
from mani_skill.envs.tasks.digital_twins.bridge_dataset_eval.base_env import WidowX250SBridgeDatasetFlatTable
from mani_skill.utils import sapien_utils
from mani_skill.utils.registration import register_env
from mani_skill.utils.structs.pose import Pose
from mani_skill.utils.structs.types import SimConfig

from embodied.envs.maniskill.bridge import OBJECTS, PLATES
from embodied.envs.maniskill.bridge.scene import BASES, BridgeScene
from embodied.envs.maniskill.cpu_physics import Rows

MIDDLE, SPACING = (-0.16, 0.0), 0.03  # of the grid of 6 x 6 points
NEAR, FAR = 0.070, 0.15 + 1e-6  # minimum distance of objects, and of some pairs
TURNS = (0.0, 45.0, 90.0, 135.0)
JOINTS = (*[(-0.15, -0.08, 0.0, 0.08, 0.15)] * 5, (-0.6, -0.3, 0.0, 0.3, 0.6))
TEMPLATES = (
    "put {} on {}",
    "place the {} on the {}",
    "set the {} down on the {}",
    "move the {} onto the {}",
    "the {} belongs on the {}",
    "take the {} and put it on the {}",
    "pick up the {} and lay it on the {}",
    "could you put the {} on the {}",
    "please place the {} on the {}",
    "get the {} onto the {}",
    "bring the {} to the {}",
    "lift the {} and set it on the {}",
    "the {} should end up on the {}",
    "grasp the {} and drop it on the {}",
    "transfer the {} to the {}",
    "let the {} rest on the {}",
    "I want the {} to be on the {}",
)
OLD_OBJECTS, NEW_OBJECTS = tuple(range(16)), tuple(range(16, 25))
OLD_PICTURES, NEW_PICTURES = OLD_OBJECTS, tuple(range(16, 21))
OLD_PLATES, NEW_PLATES = (0,), tuple(range(1, 17))


@dataclass(frozen=True)
class Variant:
    """The choices from which episodes are drawn; the defaults are the training task."""

    objects: tuple[int, ...] = OLD_OBJECTS
    plates: tuple[int, ...] = OLD_PLATES
    pictures: tuple[int, ...] = OLD_PICTURES
    places: str = "pairs"  # key of `PLACES`
    turns: tuple[float, ...] = TURNS
    extra: str = ""  # "object" or "plate": adds a wrong one
    extras: tuple[int, ...] = ()  # possible wrong ones
    textures: tuple[int, ...] = (0,)  # textures over the image; 0: none
    weight: float = 0.0  # strength of the texture
    everywhere: bool = False  # True: over the whole image; False: over robot and objects
    templates: tuple[int, ...] = (0,)  # wordings of the instruction
    starts: bool = False  # True: the arm begins elsewhere
    heights: tuple[float, ...] = (0.90, 0.90)  # heights from which object, plate and third object are dropped
    jumps: bool = False  # True: the object moves to the third place during the episode

    @property
    def digits(self) -> dict[str, int]:
        """The number of choices of each kind, the slowest digit first."""
        return {
            "object": len(self.objects),
            "extra": len(self.extras) - 1 if self.extra else 1,
            "texture": len(self.textures),
            "template": len(self.templates),
            "plate": len(self.plates),
            "picture": len(self.pictures),
            "start": len(starts()) if self.starts else 1,
            "places": len(PLACES[self.places]()),
            "turn": len(self.turns),
        }

    def __len__(self) -> int:
        return prod(self.digits.values())

    def episode(self, number: int) -> Episode:
        if not 0 <= number < len(self):
            raise IndexError(f"episode {number}: there are {len(self)}")
        chosen = {}
        for name, count in reversed(self.digits.items()):
            number, chosen[name] = divmod(number, count)
        thing, plate = self.objects[chosen["object"]], self.plates[chosen["plate"]]
        right = thing if self.extra == "object" else plate
        wrong = [extra for extra in self.extras if extra != right]
        return Episode(
            object=thing,
            plate=plate,
            extra=(self.extra, wrong[chosen["extra"]]) if self.extra else None,
            picture=self.pictures[chosen["picture"]],
            texture=self.textures[chosen["texture"]],
            template=self.templates[chosen["template"]],
            places=PLACES[self.places]()[chosen["places"]],
            turn=self.turns[chosen["turn"]],
            start=starts()[chosen["start"]] if self.starts else np.zeros(6),
        )


@dataclass(frozen=True)
class Episode:
    object: int
    plate: int
    extra: tuple[str, int] | None
    picture: int
    texture: int
    template: int
    places: np.ndarray  # [2 or 3, 2]: of object, plate and a third object
    turn: float  # degrees
    start: np.ndarray  # [6], offsets of the arm's initial joints, in radians


def grid_places(size: int) -> list[tuple[float, float]]:
    """size x size points around the middle."""
    steps = (np.arange(size) - (size - 1) / 2) * SPACING
    return [(MIDDLE[0] + x, MIDDLE[1] + y) for x, y in product(steps.tolist(), repeat=2)]


def separate_places(points: list[tuple[float, float]], things: int, far: tuple[int, int] | None = None) -> np.ndarray:
    """[places, things, 2]: all ways to put objects on these points, at least NEAR apart, and the pair `far` at least
    FAR apart."""
    placements = []
    for places in product(points, repeat=things):
        pairs = [(a, b) for a in range(things) for b in range(a)]
        if all(dist(places[a], places[b]) > (FAR if far == (b, a) else NEAR) for a, b in pairs):
            placements.append(places)
    return np.array(placements)


@cache
def pairs() -> np.ndarray:
    return separate_places(grid_places(6), 2)


@cache
def border_places() -> np.ndarray:
    """A step outside the usual grid."""
    inside = {(round(x, 6), round(y, 6)) for x, y in grid_places(6)}
    return separate_places([(x, y) for x, y in grid_places(8) if (round(x, 6), round(y, 6)) not in inside], 2)


@cache
def two_objects() -> np.ndarray:
    return separate_places(grid_places(6), 3, far=(0, 2))


@cache
def two_plates() -> np.ndarray:
    return separate_places(grid_places(6), 3, far=(1, 2))


@cache
def starts() -> np.ndarray:
    return np.array([joints for joints in product(*JOINTS) if abs(joints[1] + joints[2]) <= 0.25])


PLACES = {"pairs": pairs, "border": border_places, "two_objects": two_objects, "two_plates": two_plates}
BORDER = {"places": "border", "turns": (-22.5, -67.5, -112.5, -157.5), "heights": (0.95, 0.95)}
PAINTS = {
    f"Vision{kind}{number}-v1": (kind == "Whole", int(number) / 10)
    for kind in ("Texture", "Whole")
    for number in ("03", "05")
}


def variants(which: str) -> dict[str, Variant]:
    """Variants by the end of a task's name; `which` is train, test or all."""
    old, new = which in ("train", "all"), which in ("test", "all")
    pick = lambda before, after: before * old + after * new  # noqa: E731
    objects, pictures = pick(OLD_OBJECTS, NEW_OBJECTS), pick(OLD_PICTURES, NEW_PICTURES)
    plates, main = pick(OLD_PLATES, NEW_PLATES), Variant()
    textures = pick((0,), tuple(range(1, 17)))
    triples = {"places": "two_objects", "heights": (0.95, 0.92, 1.0)}
    by_name = {
        "Single-v1": replace(main, objects=(0,), pictures=(0,)),
        "Main-v3": replace(main, objects=objects, pictures=pictures),
        "MainCarrot-v3": replace(main, objects=objects, pictures=(0,)),
        "MainImage-v3": replace(main, objects=(0,), pictures=pictures),
        "Carrot-v1": replace(main, objects=objects),
        "VisionImage-v1": replace(main, pictures=pictures),
        "Plate-v1": replace(main, plates=plates),
        "Instruct-v1": replace(main, templates=textures),
        "MultiCarrot-v1": replace(main, objects=objects, extra="object", extras=objects, **triples),
        "MultiPlate-v1": replace(
            main,
            plates=plates,
            extra="plate",
            extras=tuple(sorted({*plates, *NEW_PLATES})),
            pictures=OLD_PICTURES + NEW_PICTURES,
            places="two_plates",
            heights=(1.0, 0.92, 0.96),
        ),
        "Position-v1": replace(main, **(BORDER if new else {})),
        "EEPose-v1": replace(main, starts=new),
        "PositionChangeTo-v1": replace(main, places="two_objects", heights=(0.95, 0.92, 1.0), jumps=True)
        if new
        else main,
    }
    for name, (everywhere, weight) in PAINTS.items():
        by_name[name] = replace(main, textures=textures, weight=weight, everywhere=everywhere)
    return by_name


IN_DISTRIBUTION = ("Single-v1", "Main-v3", "MainCarrot-v3", "MainImage-v3")


def variant(name: str, which: str | None) -> Variant:
    """The variant of a task. `which` unset: training objects for the training tasks, unseen objects for other tasks."""
    return variants(which or ("train" if name in IN_DISTRIBUTION else "test"))[name]


FOLDER = ASSET_DIR / "tasks" / OBJECTS
QPOS = (-0.01840777, 0.0398835, 0.22242722, -0.00460194, 1.36524296, 0.00153398, 0.037, 0.037)
TABLE, STEPS = 0.870, 80  # the height of the table top; env steps
ENOUGH, HELD = 5, 0.03  # steps of holding that count as held; newtons between object and plate
MARGIN, GAP = 0.01, 0.05  # tolerances in metres beside and above a plate
JUMP = 5  # the step at which an object jumps
SHELF = 0.5  # the height of the ground behind the camera


class Models:
    """A folder of objects with model_db.json, which has their order and sizes."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        named = json.loads((folder / "model_db.json").read_text(encoding="utf-8"))
        self.names, self.about = list(named), list(named.values())

    def folder(self, number: int, below: str = "") -> Path:
        return self.path / below / self.names[number]

    def size(self, number: int) -> np.ndarray:
        box = self.about[number]["bbox"]
        return np.subtract(box["max"], box["min"])


class PutOnPlate(BridgeScene, BaseEnv):
    scene_setting = "flat_table"
    name = "Main-v3"

    def __init__(self, object_set: str | None = None, **options: Any) -> None:
        self.variant = variant(self.name, object_set)
        objects = {*self.variant.objects, *(self.variant.extras if self.variant.extra == "object" else ())}
        plates = {*self.variant.plates, *(self.variant.extras if self.variant.extra == "plate" else ())}
        self.things = [*product(["object"], sorted(objects)), *product(["plate"], sorted(plates))]
        self.models = {"object": Models(FOLDER / "more_carrot"), "plate": Models(FOLDER / "more_plate")}
        self.tables = Models(FOLDER / "more_table")
        super().__init__(robot_uids=WidowX250SBridgeDatasetFlatTable, **options)

    @property
    def _default_sim_config(self) -> SimConfig:
        return SimConfig(sim_freq=500, control_freq=5, spacing=20)

    # The scene

    def _load_agent(self, options: dict) -> None:
        super()._load_agent(options, sapien.Pose(*BASES[self.scene_setting]))

    def _load_lighting(self, options: dict) -> None:
        """Builds the scene as ManiSkill's twins do."""
        self.scene.set_ambient_light([0.3] * 3)
        for direction, strength in (([0, 0, -1], 2.2), ([-1, -0.5, -1], 0.7), ([1, 1, -1], 0.7)):
            self.scene.add_directional_light(direction, [strength] * 3)

    def _load_scene(self, options: dict) -> None:
        for robot in self.agent.robot._objs:
            sapien_utils.set_articulation_render_material(robot, specular=0.9, roughness=0.3)
        self._add_box("table", [-0.1, 0.0, TABLE - 0.05], [0.6, 0.6, 0.05])
        self._add_box("shelf", [1.75, 4.0, SHELF - 0.05], [1.0, 4.5, 0.05])
        self.actors = {thing: self._add_thing(*thing) for thing in self.things}
        count = self.num_envs
        self.episodes: list[Episode | None] = [None] * count
        self._held = torch.zeros(count, dtype=torch.int32, device=self.device)
        self._grasped, self._held_long = torch.zeros((2, count), dtype=torch.bool, device=self.device)
        self._half = torch.zeros((count, 2, 3), device=self.device)  # sides of the boxes around object and plate

    def _add_box(self, name: str, place: list[float], half: list[float]) -> None:
        builder = self.scene.create_actor_builder()
        builder.add_box_collision(half_size=half)
        builder.add_box_visual(half_size=half)
        builder.initial_pose = sapien.Pose(place)
        builder.build_static(name)

    def _add_thing(self, kind: str, number: int) -> Any:
        folder, about = self.models[kind].folder(number), self.models[kind].about[number]
        builder = self.scene.create_actor_builder()
        rough = sapien.physx.PhysxMaterial(static_friction=1.0, dynamic_friction=1.0, restitution=0.0)
        builder.add_multiple_convex_collisions_from_file(
            str(folder / "collision.obj"), material=rough, density=about.get("density", 1000)
        )
        drawn = [folder / f"textured.{ending}" for ending in ("obj", "dae", "glb")]
        builder.add_visual_from_file(str(next(path for path in drawn if path.exists())))
        builder.initial_pose = sapien.Pose(parked(kind, number))
        return builder.build(f"{kind}-{number}")

    # Episodes

    def _initialize_episode(self, env_idx: torch.Tensor, options: dict) -> None:
        """Draws on the CPU, so that a seed gives the same episode on a GPU."""
        drawn = torch.randint(len(self.variant), (len(env_idx),), device="cpu")
        rows, before = env_idx.tolist(), list(self.episodes)
        for row, number in zip(rows, options.get("episode_id", drawn).tolist(), strict=True):
            self.episodes[row] = self.variant.episode(number)
        everyone = self.scene._reset_mask
        for thing, actor in self.actors.items():
            poses = {row: self._pose(thing, self.episodes[row]) for row in rows}
            moved = [row for row in rows if poses[row] or before[row] is None or self._pose(thing, before[row])]
            if moved:
                placed = [poses[row] or ([*parked(*thing)], [1, 0, 0, 0]) for row in moved]
                p, q = (
                    torch.tensor(np.array(column), dtype=torch.float32, device=self.device) for column in zip(*placed)
                )
                self.scene._reset_mask = Rows.of(np.array(moved), self.device)
                actor.set_pose(Pose.create_from_pq(p, q))
        self.scene._reset_mask = everyone
        start = np.stack([np.add(QPOS, np.append(self.episodes[row].start, [0, 0])) for row in rows])
        self.agent.robot.set_pose(sapien.Pose(*BASES[self.scene_setting]))
        self.agent.reset(init_qpos=torch.tensor(start, dtype=torch.float32, device=self.device))
        begun = [self.episodes[row] for row in rows]
        sizes = [[self._box("object", e.object, e.turn), self._box("plate", e.plate, 0.0)] for e in begun]
        self._half[env_idx] = torch.tensor(np.array(sizes) / 2, dtype=torch.float32, device=self.device)
        self._held[env_idx] = 0
        self._grasped[env_idx] = self._held_long[env_idx] = False
        self.__dict__.pop("_foreground_ids", None)

    def _pose(self, thing: tuple[str, int], episode: Episode | None) -> tuple[list, list] | None:
        """The pose from which an object is dropped; None if the episode does not use it."""
        if episode is None:
            return None
        heights, places = self.variant.heights, episode.places
        used = [("object", episode.object), ("plate", episode.plate), *([episode.extra] if episode.extra else [])]
        if thing not in used:
            return None
        at = used.index(thing)
        return [*places[at], heights[at]], rotation_about_z(episode.turn if thing[0] == "object" else 0.0)

    def _box(self, kind: str, number: int, turn: float) -> np.ndarray:
        """Sides of the axis-aligned box around an object with this rotation."""
        x, y, z = self.models[kind].size(number)
        c, s = abs(np.cos(np.radians(turn))), abs(np.sin(np.radians(turn)))
        return np.array([c * x + s * y, s * x + c * y, z])

    def _before_control_step(self) -> None:
        """The jump of PositionChangeTo."""
        rows = torch.nonzero(self._elapsed_steps == JUMP)[:, 0].tolist() if self.variant.jumps else []
        if not rows:
            return
        mask = self.scene._reset_mask
        for row in rows:
            episode = self.episodes[row]
            self.scene._reset_mask = Rows.of(np.array([row]), self.device)
            place = [*episode.places[2], self.variant.heights[2]]
            actor = self.actors["object", episode.object]
            actor.set_pose(Pose.create_from_pq(torch.tensor([place]), torch.tensor([rotation_about_z(episode.turn)])))
            actor.set_linear_velocity(torch.zeros(3, device=self.device))
            actor.set_angular_velocity(torch.zeros(3, device=self.device))
        self.scene._reset_mask = mask
        if self.gpu_sim_enabled:
            self.scene._gpu_apply_all()
            self.scene._gpu_fetch_all()

    # Outcome

    def evaluate(self) -> dict[str, torch.Tensor]:
        grasped = self._of_each(lambda episode: ("object", episode.object), self.agent.is_grasping)
        self._held = torch.where(grasped, self._held + 1, 0)
        self._grasped = self._grasped | grasped
        self._held_long = self._held_long | (self._held >= ENOUGH)
        over = self._poses("object")[:, :3] - self._poses("plate")[:, :3]
        beside = torch.linalg.norm(over[:, :2], dim=1) <= self._half[:, 1, :2].amax(1) + MARGIN
        above = (over[:, 2] > 0) & (over[:, 2] - self._half[:, :, 2].sum(1) <= GAP)
        touching = self._of_each(
            lambda episode: (("object", episode.object), ("plate", episode.plate)),
            lambda pair: torch.linalg.norm(self.scene.get_pairwise_contact_forces(*pair), dim=1) > HELD,
        )
        success = beside & above & touching
        return {
            "is_src_obj_grasped": self._grasped.clone(),
            "consecutive_grasp": self._held_long.clone(),
            "src_on_target": success,
            "success": success,
        }

    def laid_out(self) -> tuple[torch.Tensor, ...]:
        sizes = np.stack([self.models["object"].size(episode.object) for episode in self.episodes])
        tops = torch.tensor([self.models["plate"].about[episode.plate]["bbox"]["max"][2] for episode in self.episodes])
        held = self._of_each(lambda episode: ("object", episode.object), self.agent.is_grasping)
        return self._poses("object"), self._poses("plate"), torch.as_tensor(sizes), tops, held

    def _of_each(self, what: Callable, ask: Callable) -> torch.Tensor:
        """[N]: a value of each row's own object or objects; `ask` computes it for all rows at once."""
        wanted = [what(episode) for episode in self.episodes]
        answer = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
        for thing in dict.fromkeys(wanted):
            actors = self.actors.get(thing) or tuple(self.actors[key] for key in thing)
            shows_it = torch.tensor([name == thing for name in wanted], device=self.device)
            answer |= shows_it & ask(actors)
        return answer

    def _poses(self, kind: str) -> torch.Tensor:
        """Poses [N, 7] of each row's object or plate."""
        actors = [self.actors[kind, getattr(episode, kind)] for episode in self.episodes]
        return torch.stack([actor.pose.raw_pose[row] for row, actor in enumerate(actors)])

    def get_language_instruction(self) -> list[str]:
        return [self._instruction(episode) for episode in self.episodes]

    def _instruction(self, episode: Episode) -> str:
        names = self.models["object"].about[episode.object]["name"], self.models["plate"].about[episode.plate]["name"]
        return TEMPLATES[episode.template].format(*names)

    def _get_obs_extra(self, info: dict) -> dict[str, torch.Tensor]:
        """The poses of objects, for policies that observe them."""
        if self._obs_mode != "state":
            return {}
        return {"places": torch.cat([self._poses("object"), self._poses("plate")], dim=1)}

    # Images

    @cached_property
    def _foreground_ids(self) -> torch.Tensor:
        """Cleared at every reset."""
        robot = torch.stack([link.per_scene_id for link in self.agent.robot.get_links()], dim=1)
        ids = []
        for row, episode in enumerate(self.episodes):
            things = [("object", episode.object), ("plate", episode.plate), *([episode.extra] if episode.extra else [])]
            bodies = [self.actors[thing].per_scene_id[row] for thing in things]
            ids.append(torch.cat([robot[row], torch.stack(bodies)]))
        return torch.stack(ids)

    def kept_ids(self) -> torch.Tensor:
        return self._foreground_ids

    def photo(self, scene: int, height: int, width: int, square: bool) -> np.ndarray:
        return self.read_photo(str(self.tables.folder(self.episodes[scene].picture, "imgs")), height, width, square)

    def before_photo(self, seen: np.ndarray, segments: np.ndarray, scene: int, square: bool) -> np.ndarray:
        whole = super().before_photo(seen, segments, scene, square)
        about = self.tables.about[self.episodes[scene].texture]
        mix, texture = self.variant.weight * about["mix"], FOLDER / "more_table" / "textures" / about["texture"]
        front = np.isin(segments, self._foreground_ids[scene].cpu().numpy())
        return paint_over(whole, front, str(texture), mix, self.variant.everywhere) if mix else whole

    def before_photos(self, seen: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
        if not self.variant.weight:
            return super().before_photos(seen, segments)
        rows = zip(seen.cpu().numpy(), segments[..., 0].cpu().numpy())
        pictures = [self.before_photo(*row, scene, False) for scene, row in enumerate(rows)]
        return torch.as_tensor(np.stack(pictures), device=seen.device)


def parked(kind: str, number: int) -> tuple[float, float, float]:
    return (1.0 if kind == "object" else 2.0, 0.3 * number, SHELF + 0.1)


def rotation_about_z(degrees: float) -> list[float]:
    half = np.radians(degrees) / 2
    return [float(np.cos(half)), 0.0, 0.0, float(np.sin(half))]


def paint_over(picture: np.ndarray, front: np.ndarray, path: str, mix: float, everywhere: bool) -> np.ndarray:
    """Mixes a texture into an image [H, W, 3]: over robot and objects (`front` [H, W]), as large as their bounding box;
    or everywhere, as a part of a larger texture that moves with that box."""
    if not front.any():
        return picture
    height, width = front.shape
    (top, bottom), (left, right) = ((places.min(), places.max() + 1) for places in np.nonzero(front))
    texture = cv2.cvtColor(cv2.imread(path), cv2.COLOR_BGR2RGB)
    layer = np.zeros_like(picture)
    if everywhere:
        y, x = (top + bottom) // 2, (left + right) // 2
        layer = cv2.resize(texture, (2 * width, 2 * height))[y : y + height, x : x + width]
    else:
        layer[top:bottom, left:right] = cv2.resize(texture, (int(right - left), int(bottom - top)))
    mixed = np.round(picture * (1 - mix) + layer * mix).astype(np.uint8)
    return mixed if everywhere else np.where(front[..., None], mixed, picture)


for name in variants("all"):
    kind = type(f"PutOnPlate{name.partition('-')[0]}", (PutOnPlate,), {"name": name})
    register_env(PLATES + name, max_episode_steps=STEPS)(kind)
