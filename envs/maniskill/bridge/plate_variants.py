"""The initial states of the PutOnPlate-25 tasks: the training task, and variants that differ from it in one property.

An episode is a number whose digits choose object, plate, photograph, places and so on; the last digit, the object's
rotation, changes fastest. Places are points of a grid on the table, in metres. No simulator imports.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import dist, prod

import numpy as np

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


def grid(size: int) -> list[tuple[float, float]]:
    """size x size points around the middle."""
    steps = (np.arange(size) - (size - 1) / 2) * SPACING
    return [(MIDDLE[0] + x, MIDDLE[1] + y) for x, y in product(steps.tolist(), repeat=2)]


def apart(points: list[tuple[float, float]], things: int, far: tuple[int, int] | None = None) -> np.ndarray:
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
    return apart(grid(6), 2)


@cache
def border() -> np.ndarray:
    """A step outside the usual grid."""
    inside = {(round(x, 6), round(y, 6)) for x, y in grid(6)}
    return apart([(x, y) for x, y in grid(8) if (round(x, 6), round(y, 6)) not in inside], 2)


@cache
def two_objects() -> np.ndarray:
    return apart(grid(6), 3, far=(0, 2))


@cache
def two_plates() -> np.ndarray:
    return apart(grid(6), 3, far=(1, 2))


@cache
def starts() -> np.ndarray:
    return np.array([one for one in product(*JOINTS) if abs(one[1] + one[2]) <= 0.25])


PLACES = {"pairs": pairs, "border": border, "two_objects": two_objects, "two_plates": two_plates}
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
