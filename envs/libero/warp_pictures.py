"""Pictures of MuJoCo's models by ray tracing in Warp, on a GPU or on cores, without a graphics driver.

Rules are those of MuJoCo's OpenGL: shapes of triangles, light at their corners, textures with coarser copies for what
is far away, four rays for a pixel at an edge, one mirror. LIBERO has no shadows and no fog, and none are drawn. The
model is a dict of arrays (`drawing.arrays_of`), so any version of MuJoCo may have loaded it.
"""

# ruff: noqa: UP018, RUF046  # Warp takes a plain number for a constant

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import warp as wp

wp.config.log_level = wp.LOG_ERROR
wp.set_module_options({"enable_backward": False, "fast_math": True})
PLANE, SPHERE, CAPSULE, ELLIPSOID, CYLINDER, BOX, MESH = 0, 2, 3, 4, 5, 6, 7  # MuJoCo's types of geoms
FLAT, SKY = 0, 2  # MuJoCo's types of textures; 1 is a cube, too
RGB = 1  # the role of a material's texture
SLICES, STACKS, QUADS, CELLS = 28, 16, 4, 24  # of round shapes, of a box's side, of a plane
GREY = (0.5, 0.5, 0.5, 1.0)  # color of a geom that shows its material's
FACES = 6
LAYERS = 4  # transparent surfaces in a row
CLEAR = 0.005
SKIN = 1e-5
FAR = wp.constant(1e6)


@wp.struct
class Scene:
    """Instances (geoms, then sites) in all rows, and what they are made of."""

    count: int  # instances of a row
    tree: wp.uint64  # their boxes, grouped by row
    root: wp.array(dtype=int)
    position: wp.array2d(dtype=wp.vec3)  # [rows, instances]
    rotation: wp.array2d(dtype=wp.mat33)
    color: wp.array2d(dtype=wp.vec4)
    mesh: wp.array(dtype=wp.uint64)
    corner: wp.array(dtype=int)  # an instance's first corner
    normal: wp.array(dtype=wp.vec3)  # of each corner
    place: wp.array(dtype=wp.vec3)  # of each corner in the texture
    shine: wp.array(dtype=wp.vec3)  # specular, exponent, emission
    texture: wp.array(dtype=int)  # -1: none
    is_cube: wp.array(dtype=bool)
    textures: wp.array(dtype=wp.Texture2D)  # a cube's sides follow each other
    sky: int
    mirror: int  # the instance whose upper side is a mirror
    mirror_height: float
    mirror_tint: float
    lamp: wp.array2d(dtype=wp.vec3)  # [lights, 4]: ambient, diffuse, specular, attenuation; the first is the headlight
    beam: wp.array(dtype=wp.vec4)  # of each light: is directional, cosine of the cutoff, exponent, is active
    lamp_position: wp.array2d(dtype=wp.vec3)  # [rows, lights]
    lamp_direction: wp.array2d(dtype=wp.vec3)
    camera: wp.array(dtype=int)
    slope: wp.array(dtype=float)  # of a camera's outermost rays
    eye: wp.array2d(dtype=wp.vec3)  # [rows, cameras of the model]
    gaze: wp.array2d(dtype=wp.mat33)
    near: float
    side: int  # of the pictures, in pixels


@wp.struct
class Ray:
    """Rays through a pixel and through the pixels beside."""

    start: wp.vec3
    to: wp.vec3
    right: wp.vec3
    below: wp.vec3


@wp.struct
class Hit:
    instance: int
    face: int
    t: float
    u: float  # weights of the first two corners
    v: float


@wp.func
def trace(s: Scene, row: int, ray: Ray, least: float):
    """The nearest surface beyond `least` whose front the ray meets."""
    best = Hit()
    best.instance = -1
    best.t = FAR
    query = wp.bvh_query_ray(s.tree, ray.start, ray.to, s.root[row])
    number = int(0)
    while wp.bvh_query_next(query, number, best.t):
        i = number - row * s.count
        turned = wp.transpose(s.rotation[row, i])
        o = turned * (ray.start - s.position[row, i])
        d = turned * ray.to
        at, t, u, v, sign = float(least), float(0.0), float(0.0), float(0.0), float(0.0)
        n = wp.vec3()
        face = int(0)
        while at < best.t and wp.mesh_query_ray(s.mesh[i], o + at * d, d, best.t - at, t, u, v, sign, n, face):
            at = at + t
            if wp.dot(n, d) < 0.0:
                best.instance = i
                best.face = face
                best.t = at
                best.u = u
                best.v = v
                break
            at = at + SKIN
    return best


@wp.func
def light(s: Scene, row: int, eye: wp.vec3, head: wp.vec3, at: wp.vec3, n: wp.vec3, color: wp.vec3, shine: wp.vec3):
    """Color of a corner, by OpenGL's rules."""
    total = shine[2] * color
    for k in range(s.beam.shape[0]):
        beam = s.beam[k]
        strength = float(beam[3])
        toward = head
        if k > 0:
            toward = -s.lamp_direction[row, k - 1]
        if beam[0] == 0.0:
            away = s.lamp_position[row, k - 1] - at
            distance = wp.length(away)
            toward = away / distance
            cosine = wp.max(-wp.dot(toward, s.lamp_direction[row, k - 1]), 0.0)
            fade = wp.dot(s.lamp[k, 3], wp.vec3(1.0, distance, distance * distance))
            strength = strength * wp.where(cosine < beam[1], 0.0, wp.pow(cosine, beam[2])) / fade
        total = total + strength * wp.cw_mul(s.lamp[k, 0], color)
        slope = wp.dot(n, toward)
        if slope > 0.0 and strength > 0.0:
            glance = wp.max(wp.dot(n, wp.normalize(toward + wp.normalize(eye - at))), 0.0)
            total = total + strength * slope * wp.cw_mul(s.lamp[k, 1], color)
            total = total + strength * shine[0] * wp.pow(glance, shine[1]) * s.lamp[k, 2]
    return wp.min(wp.max(total, wp.vec3()), wp.vec3(1.0, 1.0, 1.0))


@wp.func
def side_of(p: wp.vec3):
    """The side of a cube in this direction: +x, -x, +y, -y, +z, -z."""
    a = wp.vec3(wp.abs(p[0]), wp.abs(p[1]), wp.abs(p[2]))
    axis = wp.where(a[1] > a[0] and a[1] >= a[2], 1, wp.where(a[2] > a[0], 2, 0))
    return 2 * axis + wp.where(p[axis] < 0.0, 1, 0)


@wp.func
def on_side(p: wp.vec3, side: int):
    """A direction's place on this side of a cube, from 0 to 1."""
    sign = 1.0 - 2.0 * float(side % 2)
    s = wp.where(side < 2, -sign * p[2], wp.where(side < 4, p[0], sign * p[0]))
    t = wp.where(side / 2 == 1, sign * p[2], -p[1])
    depth = 2.0 * wp.max(wp.abs(p[side / 2]), 1e-9)
    return wp.vec3(s / depth + 0.5, t / depth + 0.5, 0.0)


@wp.func
def paint(s: Scene, texture: int, is_cube: bool, place: wp.vec3, right: wp.vec3, below: wp.vec3):
    """Color of a texture between these places of three pixels."""
    side = int(0)
    if is_cube:
        side = side_of(place)
        place, right, below = on_side(place, side), on_side(right, side), on_side(below, side)
    image = s.textures[texture + side]
    size = wp.vec3(float(image.width), float(image.height), 0.0)
    texels = wp.max(wp.length(wp.cw_mul(right - place, size)), wp.length(wp.cw_mul(below - place, size)))
    level = wp.max(wp.log2(wp.max(texels, 1e-9)), 0.0)
    rgba = wp.texture_sample(image, wp.vec2(place[0], place[1]), dtype=wp.vec4, lod=level)
    return wp.vec3(rgba[0], rgba[1], rgba[2])


@wp.func
def blend(a: wp.vec3, b: wp.vec3, c: wp.vec3, u: float, v: float):
    return u * a + v * b + (1.0 - u - v) * c


@wp.func
def shade(s: Scene, row: int, head: wp.vec3, ray: Ray, hit: Hit, tint: float):
    """Color of what a ray has met."""
    i, mesh, k = hit.instance, s.mesh[hit.instance], s.corner[hit.instance] + 3 * hit.face
    m, p, shine = s.rotation[row, i], s.position[row, i], s.shine[i]
    a, b = wp.mesh_eval_position(mesh, hit.face, 1.0, 0.0), wp.mesh_eval_position(mesh, hit.face, 0.0, 1.0)
    c = wp.mesh_eval_position(mesh, hit.face, 0.0, 0.0)
    color = tint * wp.vec3(s.color[row, i][0], s.color[row, i][1], s.color[row, i][2])
    la = light(s, row, ray.start, head, m * a + p, wp.normalize(m * s.normal[k]), color, shine)
    lb = light(s, row, ray.start, head, m * b + p, wp.normalize(m * s.normal[k + 1]), color, shine)
    lc = light(s, row, ray.start, head, m * c + p, wp.normalize(m * s.normal[k + 2]), color, shine)
    lit = blend(la, lb, lc, hit.u, hit.v)
    if s.texture[i] < 0:
        return lit
    # The rays beside meet the plane of the same triangle.
    n = wp.cross(a - c, b - c)
    o = wp.transpose(m) * (ray.start - p)
    right, below = wp.transpose(m) * ray.right, wp.transpose(m) * ray.below
    far = wp.dot(n, c - o)
    x = o - c + right * (far / wp.min(wp.dot(n, right), -1e-12))
    y = o - c + below * (far / wp.min(wp.dot(n, below), -1e-12))
    ua, ub = wp.cross(b - c, n) / wp.max(wp.dot(n, n), 1e-30), wp.cross(n, a - c) / wp.max(wp.dot(n, n), 1e-30)
    pa, pb, pc = s.place[k], s.place[k + 1], s.place[k + 2]
    at = blend(pa, pb, pc, hit.u, hit.v)
    beside = blend(pa, pb, pc, wp.dot(x, ua), wp.dot(x, ub))
    under = blend(pa, pb, pc, wp.dot(y, ua), wp.dot(y, ub))
    return wp.cw_mul(lit, paint(s, s.texture[i], s.is_cube[i], at, beside, under))


@wp.func
def reflected(s: Scene, row: int, head: wp.vec3, ray: Ray, hit: Hit):
    """What the mirror adds."""
    color = wp.vec3()
    m = s.rotation[row, hit.instance]
    up = wp.vec3(m[0, 2], m[1, 2], m[2, 2])
    if s.normal[s.corner[hit.instance] + 3 * hit.face][2] > 0.5:
        back = wp.identity(n=3, dtype=float) - 2.0 * wp.outer(up, up)
        depth = s.mirror_height - wp.dot(up, ray.start - s.position[row, hit.instance])
        other = Ray(ray.start + 2.0 * depth * up, back * ray.to, back * ray.right, back * ray.below)
        seen = trace(s, row, other, hit.t + SKIN)
        if seen.instance >= 0:
            color = shade(s, row, head, other, seen, s.mirror_tint)
    return color


@wp.func
def in_sky(ray: wp.vec3):
    return wp.vec3(ray[0], ray[2], -ray[1])


@wp.func
def look(s: Scene, row: int, number: int, x: float, y: float):
    """Color at this place of a picture, in pixels, and the first instance there."""
    slope, eye, gaze = s.slope[number], s.eye[row, s.camera[number]], s.gaze[row, s.camera[number]]
    pixel = 2.0 * slope / float(s.side)
    to = wp.vec3(pixel * x - slope, slope - pixel * y, -1.0)
    ray = Ray(eye, gaze * to, gaze * (to + wp.vec3(pixel, 0.0, 0.0)), gaze * (to - wp.vec3(0.0, pixel, 0.0)))
    head = gaze * wp.vec3(0.0, 0.0, 1.0)
    color = wp.vec3()
    left, near, first, layer = float(1.0), float(s.near), int(-1), int(0)
    while layer < LAYERS and left > CLEAR:
        hit = trace(s, row, ray, near)
        first = wp.where(layer == 0, hit.instance, first)
        layer = wp.where(hit.instance < 0, LAYERS, layer + 1)
        if hit.instance >= 0:
            opacity = wp.min(s.color[row, hit.instance][3], 1.0)
            opacity = opacity * (2.0 - opacity)  # MuJoCo draws transparent surfaces twice
            color = color + left * opacity * shade(s, row, head, ray, hit, 1.0)
            if hit.instance == s.mirror:
                color = color + left * reflected(s, row, head, ray, hit)
            left = left * (1.0 - opacity)
            near = hit.t + SKIN
    if left > CLEAR and s.sky >= 0:
        color = color + left * paint(s, s.sky, True, in_sky(ray.to), in_sky(ray.right), in_sky(ray.below))
    return color, first


@wp.kernel
def draw_centers(s: Scene, colors: wp.array3d(dtype=wp.vec3), firsts: wp.array3d(dtype=int)):
    row, camera, at = wp.tid()
    color, first = look(s, row, camera, float(at % s.side) + 0.5, float(at / s.side) + 0.5)
    colors[row, camera, at] = color
    firsts[row, camera, at] = first


@wp.kernel
def draw_edges(
    s: Scene, colors: wp.array3d(dtype=wp.vec3), firsts: wp.array3d(dtype=int), picture: wp.array4d(dtype=wp.uint8)
):
    """Average four rays where pixels beside show another instance."""
    row, camera, at = wp.tid()
    x, y, last, first = at % s.side, at / s.side, s.side - 1, firsts[row, camera, at]
    is_edge = firsts[row, camera, wp.where(x > 0, at - 1, at)] != first
    is_edge = is_edge or firsts[row, camera, wp.where(x < last, at + 1, at)] != first
    is_edge = is_edge or firsts[row, camera, wp.where(y > 0, at - s.side, at)] != first
    is_edge = is_edge or firsts[row, camera, wp.where(y < last, at + s.side, at)] != first
    color = 1.0 * colors[row, camera, at]
    if is_edge:
        color = 0.0 * color
        for k in range(4):  # corners of a turned square, as OpenGL has them
            dx = wp.where(k < 2, 0.125, 0.375) * wp.where(k % 2 == 0, 1.0, -1.0)
            dy = wp.where(k < 2, 0.375, 0.125) * wp.where(k == 1 or k == 2, 1.0, -1.0)
            seen, _ = look(s, row, camera, float(x) + 0.5 + dx, float(y) + 0.5 + dy)
            color = color + 0.25 * seen
    for k in range(3):
        picture[row, camera, at, k] = wp.uint8(wp.clamp(color[k], 0.0, 1.0) * 255.0 + 0.5)


@wp.kernel
def find_roots(tree: wp.uint64, roots: wp.array(dtype=int)):
    roots[wp.tid()] = wp.bvh_get_group_root(tree, wp.tid())


# Shapes: points [P, 3] with faces [F, 3] that are counterclockwise from outside, normals and places of points.


def surface(points: np.ndarray, normals: np.ndarray) -> tuple[np.ndarray, ...]:
    """Two triangles for each cell of points [A, B, 3]."""
    number = np.arange(points[..., 0].size).reshape(points.shape[:2])
    a, b, c, d = (corners.ravel() for corners in (number[:-1, :-1], number[1:, :-1], number[1:, 1:], number[:-1, 1:]))
    faces = np.concatenate([np.stack([a, b, c], 1), np.stack([a, c, d], 1)])
    return points.reshape(-1, 3), faces, np.broadcast_to(normals, points.shape).reshape(-1, 3)


def joined(parts: Sequence[tuple[np.ndarray, ...]]) -> tuple[np.ndarray, ...]:
    starts = np.cumsum([0, *(len(mesh[0]) for mesh in parts)])
    points, faces, normals = zip(*parts)
    return np.concatenate(points), np.concatenate([f + n for f, n in zip(faces, starts)]), np.concatenate(normals)


def rectangle(cells: int) -> tuple[np.ndarray, ...]:
    edge = np.linspace(-1, 1, cells + 1)
    x, y = np.meshgrid(edge, edge, indexing="ij")
    return surface(np.stack([x, y, 0 * x], -1), np.array([0.0, 0.0, 1.0]))


def box() -> tuple[np.ndarray, ...]:
    points, faces, up = rectangle(QUADS)
    turns = [(np.roll([0, 1, 2], axis), np.array([1, sign, sign])) for axis in range(3) for sign in (1, -1)]
    return joined([(((points + up) * sign)[:, turn], faces, (up * sign)[:, turn]) for turn, sign in turns])


def revolved(*profiles: np.ndarray) -> tuple[np.ndarray, ...]:
    """Surfaces around z of profiles [points, 4] from below: radius and height, of the surface and of its normal."""
    angle = np.linspace(0, 2 * np.pi, SLICES + 1)[:, None]

    def around(radius: np.ndarray, height: np.ndarray) -> np.ndarray:
        return np.stack([np.cos(angle) * radius, np.sin(angle) * radius, 0 * angle + height], -1)

    return joined([surface(around(r, z), around(nr, nz)) for r, z, nr, nz in (profile.T for profile in profiles)])


def cylinder() -> tuple[np.ndarray, ...]:
    lines = [(0, -1, 0, -1), (1, -1, 0, -1)], [(1, -1, 1, 0), (1, 1, 1, 0)], [(1, 1, 0, 1), (0, 1, 0, 1)]
    return revolved(*(np.linspace(*np.array(line, float), STACKS + 1) for line in lines))


def capsule(half: float = 0.0) -> tuple[np.ndarray, ...]:
    """Half a ball below and above a cylinder; a ball if that has no height."""
    angle = np.linspace(-np.pi / 2, np.pi / 2, STACKS + 2)  # none is 0
    profile = np.stack([np.cos(angle), np.sin(angle)] * 2, -1)
    profile[:, 1] += half * np.sign(angle)
    return revolved(profile)


SOLIDS = {  # how a shape is made from its size, and the sizes along x, y and z
    PLANE: (lambda _: rectangle(CELLS), (0, 1, 1)),
    SPHERE: (lambda _: capsule(), (0, 0, 0)),
    CAPSULE: (lambda size: capsule(size[1] / size[0]), (0, 0, 0)),
    ELLIPSOID: (lambda _: capsule(), (0, 1, 2)),
    CYLINDER: (lambda _: cylinder(), (0, 0, 1)),
    BOX: (lambda _: box(), (0, 1, 2)),
}


class Shape:
    """Triangles, with a normal and a place in the texture for each corner."""

    def __init__(self, points: np.ndarray, faces: np.ndarray, normals: np.ndarray, places: np.ndarray) -> None:
        self.mesh = wp.Mesh(wp.array(points, dtype=wp.vec3), wp.array(faces.ravel(), dtype=int))
        self.normals, self.places = normals.reshape(-1, 3), places.reshape(-1, places.shape[-1])[:, :3]
        self.middle, self.half = (points.max(0) + points.min(0)) / 2, (points.max(0) - points.min(0)) / 2


def shape_of(m: Any, kind: int, size: np.ndarray, data: int, material: int) -> Shape:
    if kind != MESH:
        if kind not in SOLIDS:
            raise ValueError(f"geoms and sites of MuJoCo's type {kind} are not drawn in Warp")
        make, axes = SOLIDS[kind]
        (points, faces, normals), size = make(size), size[list(axes)]
        normals = (normals / np.maximum(size, 1e-9))[faces]
        return Shape(points * size, faces, normals, places_of(m, points, size, material)[faces])
    rows = slice(m.mesh_faceadr[data], m.mesh_faceadr[data] + m.mesh_facenum[data])
    faces, points = m.mesh_face[rows], m.mesh_vert[m.mesh_vertadr[data] :][: m.mesh_vertnum[data]]
    normals = m.mesh_normal[m.mesh_facenormal[rows] + m.mesh_normaladr[data]]
    if m.mesh_texcoordadr[data] >= 0:
        places = m.mesh_texcoord[m.mesh_facetexcoord[rows] + m.mesh_texcoordadr[data]]
        return Shape(points, faces, normals, np.pad(places, ((0, 0), (0, 0), (0, 1))))
    a, b, c = np.moveaxis(points[faces], 1, 0)
    flat = np.cross(b - a, c - a)[:, None]
    flat /= np.maximum(np.linalg.norm(flat, axis=-1, keepdims=True), 1e-12)
    normals = np.where((normals * flat).sum(-1, keepdims=True) < 0.8, flat, normals)  # sharp edges
    return Shape(points, faces, normals, places_of(m, points / size, size, material)[faces])


def places_of(m: Any, points: np.ndarray, size: np.ndarray, material: int) -> np.ndarray:
    """Places in the texture of points, in units of their shape's size."""
    texture = m.mat_texid[material, RGB] if material >= 0 else -1
    uniform = size if texture >= 0 and m.mat_texuniform[material] else np.ones(3)
    if texture < 0 or m.tex_type[texture] != FLAT:
        return points * uniform
    return points * uniform * [*(m.mat_texrepeat[material] * [0.5, -0.5]), 0] - [0.5, 0.5, 0]


def textures_of(m: Any, number: int) -> list[wp.Texture2D]:
    """A texture, or the six of a cube."""
    image = np.pad(m.images[number], ((0, 0), (0, 0), (0, 1)))
    is_flat = m.tex_type[number] == FLAT
    sides = [image] if is_flat else np.split(image, len(image) // image.shape[1])
    mode = wp.TextureAddressMode.WRAP if is_flat else wp.TextureAddressMode.CLAMP
    made = [wp.Texture2D(np.ascontiguousarray(side), address_mode=mode, num_mip_levels=0) for side in sides]
    return made if is_flat or len(made) == FACES else made * FACES


class Pictures:
    """Draws rows of one model.

    pictures = Pictures(drawing.arrays_of(model))
    frames = pictures.draw(shown, cameras=[2, 5], side=256)
    """

    def __init__(self, model: Mapping[str, Any], device: str = "cpu") -> None:
        m, self.device = SimpleNamespace(**model), wp.get_device(device)
        self._geoms = np.flatnonzero((m.geom_group == 1) | (m.geom_group == 2))
        self._sites = np.flatnonzero(m.site_group < 3)
        materials = m.geom_matid[self._geoms]
        has_color = (m.geom_rgba[self._geoms] != np.float32(GREY)).any(axis=1) | (materials < 0)
        self._colors = np.where(has_color[:, None], m.geom_rgba[self._geoms], m.mat_rgba[materials])
        things = [*zip(m.geom_type, m.geom_size, m.geom_dataid, m.geom_matid)]
        things = [things[geom] for geom in self._geoms]
        things += [(m.site_type[site], m.site_size[site], -1, -1) for site in self._sites]
        self.scene = Scene()
        with wp.ScopedDevice(self.device):
            self._add_shapes(m, things)
            self._add_textures(m, [thing[3] for thing in things])
            self._add_lamps(m)
        self.scene.near, self._slopes = float(m.near), np.tan(np.radians(m.cam_fovy) / 2)

    def _add_shapes(self, m: Any, things: Sequence[tuple[Any, ...]]) -> None:
        s, made = self.scene, {}
        keys = [(kind, *size, data, material) for kind, size, data, material in things]
        for key, thing in zip(keys, things):
            made.setdefault(key, None) or made.update({key: shape_of(m, *thing)})
        starts = dict(zip(made, np.cumsum([0, *(len(shape.normals) for shape in made.values())])))
        self.shapes = [made[key] for key in keys]
        s.count, s.mirror = len(keys), -1
        s.mesh = wp.array([shape.mesh.id for shape in self.shapes], dtype=wp.uint64)
        s.corner = wp.array([starts[key] for key in keys], dtype=int)
        s.normal = wp.array(np.concatenate([shape.normals for shape in made.values()]), dtype=wp.vec3)
        s.place = wp.array(np.concatenate([shape.places for shape in made.values()]), dtype=wp.vec3)
        self._middle, self._half = (np.stack([getattr(x, name) for x in self.shapes]) for name in ("middle", "half"))
        for at, (kind, size, _, material) in enumerate(things):
            if s.mirror < 0 and kind in (PLANE, BOX) and material >= 0 and m.mat_reflectance[material] > 0:
                s.mirror, s.mirror_tint = at, float(m.mat_reflectance[material])
                s.mirror_height = float(size[2]) if kind == BOX else 0.0

    def _add_textures(self, m: Any, materials: Sequence[int]) -> None:
        s, plain = self.scene, [0.5, 64.0, 0.0]  # without a material
        shine = np.stack([m.mat_specular, m.mat_shininess * 128, m.mat_emission], 1)
        s.shine = wp.array([shine[k] if k >= 0 else plain for k in materials], dtype=wp.vec3)
        used = [int(m.mat_texid[k, RGB]) if k >= 0 else -1 for k in materials]
        sky = int(np.append(np.flatnonzero(m.tex_type == SKY), -1)[0])
        firsts, self._textures = {-1: -1}, []
        for texture in {*used, sky} - {-1}:
            firsts[texture] = len(self._textures)
            self._textures += textures_of(m, texture)
        s.texture, s.sky = wp.array([firsts[k] for k in used], dtype=int), firsts[sky]
        s.is_cube = wp.array([k >= 0 and m.tex_type[k] != FLAT for k in used], dtype=bool)
        s.textures = wp.array(self._textures, dtype=wp.Texture2D)

    def _add_lamps(self, m: Any) -> None:
        lamps = np.stack([m.light_ambient, m.light_diffuse, m.light_specular, m.light_attenuation], 1)
        cutoff = np.cos(np.radians(m.light_cutoff))
        beams = np.stack([m.light_directional, cutoff, m.light_exponent, m.light_active], 1)
        self.scene.lamp = wp.array(np.concatenate([[[*m.headlight, [1, 0, 0]]], lamps]), dtype=wp.vec3)
        self.scene.beam = wp.array(np.concatenate([[[1, 0, 0, 1]], beams]), dtype=wp.vec4)

    def draw(self, shown: Mapping[str, np.ndarray], cameras: Sequence[int], side: int) -> np.ndarray:
        """uint8 [rows, cameras, side, side, 3], upright. `shown` holds arrays of all rows, `rendering.SHOWN`."""
        rows, s = len(shown["geom_xpos"]), self.scene
        vectors = lambda name: shown[name].reshape(rows, -1, 3).astype(np.float32)  # noqa: E731
        turns = lambda name: shown[name].reshape(rows, -1, 3, 3).astype(np.float32)  # noqa: E731
        position = np.concatenate([vectors("geom_xpos")[:, self._geoms], vectors("site_xpos")[:, self._sites]], 1)
        rotation = np.concatenate([turns("geom_xmat")[:, self._geoms], turns("site_xmat")[:, self._sites]], 1)
        colors = np.broadcast_to(self._colors, (rows, *self._colors.shape))
        color = np.concatenate([colors, shown["site_rgba"][:, self._sites]], 1)
        middle = position + (rotation @ self._middle[..., None])[..., 0]
        half = (np.abs(rotation) @ self._half[..., None])[..., 0] * (color[..., 3:] > 0) + SKIN * (color[..., 3:] > 0)
        with wp.ScopedDevice(self.device):
            s.position, s.rotation = wp.array(position, dtype=wp.vec3), wp.array(rotation, dtype=wp.mat33)
            s.color, s.side = wp.array(color, dtype=wp.vec4), side
            s.camera, s.slope = wp.array([*cameras], dtype=int), wp.array(self._slopes[[*cameras]], dtype=float)
            s.eye, s.gaze = wp.array(vectors("cam_xpos"), dtype=wp.vec3), wp.array(turns("cam_xmat"), dtype=wp.mat33)
            s.lamp_position = wp.array(vectors("light_xpos"), dtype=wp.vec3)
            s.lamp_direction = wp.array(vectors("light_xdir"), dtype=wp.vec3)
            low, high = (wp.array((middle + way * half).reshape(-1, 3), dtype=wp.vec3) for way in (-1, 1))
            tree = wp.Bvh(low, high, groups=wp.array(np.repeat(np.arange(rows), s.count), dtype=int))
            s.tree, s.root = tree.id, wp.zeros(rows, dtype=int)
            wp.launch(find_roots, dim=rows, inputs=[s.tree, s.root])
            dim = (rows, len(cameras), side * side)
            colors, firsts = wp.empty(dim, dtype=wp.vec3), wp.empty(dim, dtype=int)
            picture = wp.empty((*dim, 3), dtype=wp.uint8)
            wp.launch(draw_centers, dim=dim, inputs=[s, colors, firsts])
            wp.launch(draw_edges, dim=dim, inputs=[s, colors, firsts, picture])
            return picture.numpy().reshape(*dim[:2], side, side, 3)

    def close(self) -> None:
        """Nothing is left open."""
