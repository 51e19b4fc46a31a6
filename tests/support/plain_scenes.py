"""LIBERO's and robosuite's scenes without what is only looked at: the meshes that are drawn and not touched, and the
pictures on things. Masses, contacts and episodes stay the same bit for bit. A task's scene takes a quarter of the
processor time and a tenth of the memory."""

import importlib.util
import re
from contextlib import contextmanager
from pathlib import Path

import pytest

TEXTURE = re.compile(r'<texture\b[^>]*\bfile="[^"]*"[^>]*/>')
SEEN = re.compile(r'<mesh\b[^>]*\bfile="[^"]*_vis[^"]*"[^>]*/>')
SIDE = 128  # pixels of a picture that was made smaller


def named(element, key, default=""):
    found = re.search(rf'\b{key}="([^"]*)"', element)
    return found[1] if found else default


def grey(element):
    name, kind = named(element, "name"), named(element, "type", "cube")
    return f'<texture name="{name}" type="{kind}" builtin="flat" rgb1=".5 .5 .5" width="1" height="6"/>'


def tiny(element):
    return f'<mesh name="{named(element, "name")}" vertex="0 0 0 .01 0 0 0 .01 0 0 0 .01"/>'


def bare(xml):
    xml = TEXTURE.sub(lambda found: grey(found[0]), xml)
    return SEEN.sub(lambda found: tiny(found[0]), xml)


def with_small_pictures(folder):
    """The scenes as they look from afar, without the robot's skin."""
    from PIL import Image

    def small(found):
        path = Path(named(found[0], "file"))
        smaller = folder / f"{path.parent.name}-{path.name}"
        if not smaller.exists():
            with Image.open(path) as picture:
                picture.resize((SIDE, SIDE), Image.Resampling.NEAREST).save(smaller)
        return found[0].replace(str(path), str(smaller))

    def skinned(found):
        return tiny(found[0]) if "/robots/" in found[0] else found[0]

    return lambda xml: SEEN.sub(skinned, TEXTURE.sub(small, xml))


@contextmanager
def scenes(change):
    """MuJoCo's models are built from what `change` makes of their XML."""
    if importlib.util.find_spec("libero") is None:
        yield
        return
    from embodied.envs.mujoco.loading import simulator

    simulator()
    from robosuite.environments import base

    build = base.MjSim.__base__.from_xml_string.__func__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base.MjSim, "from_xml_string", lambda xml: build(base.MjSim, change(xml)))
        yield
