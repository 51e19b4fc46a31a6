"""The bridge tasks: ManiSkill's digital twins of four BridgeData scenes, and our PutOnPlate-25 on the same table.

Their names and files, which cannot be distributed with a package. No simulator imports.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

TWINS = {  # task -> number of initial states
    "PutCarrotOnPlateInScene-v1": 24,
    "PutSpoonOnTableClothInScene-v1": 24,
    "StackGreenCubeOnYellowCubeBakedTexInScene-v1": 24,
    "PutEggplantInBasketScene-v1": 64,
}
PLATES = "PutOnPlateInScene25"  # prefix of the family's names
CONTROL = "arm_pd_ee_target_delta_pose_align2_gripper_pd_joint_pos"  # these arms' only control mode
CAMERA = "3rd_view_camera"
ROBOT, SCENES, OBJECTS = "widowx250s", "bridge_v2_real2sim", "put_on_plate_25"  # ManiSkill's names, and our own
FILES = {  # asset -> files below data/ of MS_ASSET_DIR
    ROBOT: "robots/widowx/wx250s.urdf",
    SCENES: "tasks/bridge_v2_real2sim_dataset/custom/info_bridge_custom_v0.json",
    OBJECTS: "tasks/put_on_plate_25/more_carrot/model_db.json",
}
SVG = "svgpathtools"  # a package that a ManiSkill task needs but does not install


def is_bridge(task: str | Sequence[str]) -> bool:
    tasks = (task,) if isinstance(task, str) else task
    return all(name in TWINS or name.startswith(PLATES) for name in tasks)


def missing_bridge_assets(task: str, folder: Path, exists: Callable[[Path], bool] = Path.exists) -> list[str]:
    """The assets of a bridge task that `folder` lacks."""
    needed = (ROBOT, OBJECTS if task.startswith(PLATES) else SCENES)
    return [name for name in needed if not exists(folder / FILES[name])]


def asset_folder(environ: Mapping[str, str]) -> Path:
    """The folder of ManiSkill's downloads, like its ASSET_DIR, without an import."""
    return Path(environ.get("MS_ASSET_DIR", Path.home() / ".maniskill")) / "data"


def source_of(asset: str) -> str:
    """The command that downloads an asset of a ManiSkill task."""
    if asset == SVG:
        return f"python -m pip install {SVG}"
    if asset == OBJECTS:
        return f"RL4VLA's folders more_carrot, more_plate and more_table into MS_ASSET_DIR/data/tasks/{OBJECTS}"
    return f"python -m mani_skill.utils.download_asset {asset}"
