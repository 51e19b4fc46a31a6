"""Pictures for language models: their tokens in a conversation, and the model's vision tower.

A picture is loaded by its name wherever it is needed, and processed as the model's published folder says. Places of
pictures are tokens below 0 (`core.conversations`), not the model's own picture token: a policy that writes that token
shows no picture.
"""

from __future__ import annotations

import importlib
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied.core.arrays import tensor_of
from embodied.core.conversations import FIRST_PLACE
from embodied.core.errors import CheckpointError
from embodied.core.pictures import (
    PictureError,
    Video,
    drawing,
    is_video,
    load_picture,
    load_video,
    picture_size,
    short_name,
)
from embodied.policies.language.attention import COUNTED, DividedPass, travel
from embodied.policies.language.config import SEEING

PREPROCESSOR = "preprocessor_config.json"
KEPT_BYTES = 2**28  # limit for cached pixels of recent pictures
MOST_AHEAD = 32  # pictures that wait to be read ahead
BLANK = drawing("count", 0, 16)  # for a rank without a picture of its own that must take part


@dataclass(frozen=True)
class Picture:
    """A picture, or frames of a video, in its model's format."""

    pixels: dict[str, np.ndarray]  # the image processor's output
    tokens: tuple[int, ...]  # its tokens in a conversation; places are below 0
    grid: tuple[int, int, int] = (0, 0, 0)  # moments, rows and columns of its places, if positions depend on them
    step: float = 0.0  # positions from a moment to the next one

    @property
    def places(self) -> int:
        return sum(token < 0 for token in self.tokens)

    @property
    def is_place(self) -> np.ndarray:
        """bool [n]: True for places, among the tokens from the first place to the last."""
        places = np.array(self.tokens) < 0
        at = np.flatnonzero(places)
        return places[at[0] : at[-1] + 1]

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.pixels.values())


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Inside, a picture of an odd size is named."""
    try:
        yield
    except ValueError as err:
        raise PictureError(f"the picture {short_name(name)} cannot be processed: {err}") from None


class Sight:
    """The interface to a kind of model. Subclasses use its image processor and vision tower."""

    processor_class: str
    decoder: str  # the name of the part of the model that reads text
    tower_blocks: str  # name of the list of the vision tower's blocks
    two_axes = False  # True: places of a picture have positions in rows and columns

    def __init__(self, config: Any, tokenizer: Any, folder: Path | None = None, **options: Any) -> None:
        """The image processor's options come from `folder`, or are `options`."""
        self.config, self.tokenizer = config, tokenizer
        self.placeholder = tokenizer.convert_ids_to_tokens(config.image_token_id)
        video = getattr(config, "video_token_id", None)
        word = None if video is None else tokenizer.convert_ids_to_tokens(video)
        self.video_placeholder = word or self.placeholder
        self.processor = self._processor(folder, options)
        self.kept: OrderedDict[str, Picture] = OrderedDict()
        self.kept_bytes = 0
        self.reading = threading.Lock()  # a server's threads encode and generate at the same time
        self.coming: dict[str, Future[Picture]] = {}  # pictures that are being read ahead
        self.ahead = ThreadPoolExecutor(1, "pictures")

    @classmethod
    def patches_of_place(cls, config: Any) -> int:
        """The number of patches of a place."""
        raise NotImplementedError

    @classmethod
    def count_features(cls, model: Any, places: int) -> Tensor:
        """`Policy.counted_features` of this kind of model."""
        raise NotImplementedError

    def __deepcopy__(self, _: dict) -> Sight:
        """Copies of a policy share it."""
        return self

    def _processor(self, folder: Path | None, options: dict[str, Any]) -> Any:
        module, _, name = self.processor_class.partition(":")
        kind = getattr(importlib.import_module(module), name)
        if folder is None:
            return kind(**options)
        try:
            return kind.from_pretrained(folder, local_files_only=True)
        except Exception as err:  # of many kinds
            raise CheckpointError(f"{folder / PREPROCESSOR} cannot be read: {' '.join(str(err).split())}") from None

    def save(self, folder: Path) -> None:
        """Write the image processor's options in transformers' format."""
        self.processor.save_pretrained(folder)

    # Pictures

    def read(self, name: str) -> Picture:
        """The picture of this name. Several threads may process pictures at the same time."""
        with self.reading:
            picture, coming = self.kept.get(name), self.coming.get(name)
        if picture is None:
            picture = coming.result() if coming else self._load(name)
        return picture

    def read_ahead(self, names: Iterable[str]) -> None:
        """Begin to read these pictures in a thread; `read` waits for them."""
        with self.reading:
            new = [name for name in dict.fromkeys(names) if name not in self.kept and name not in self.coming]
            for name in new[: max(0, MOST_AHEAD - len(self.coming))]:
                self.coming[name] = self.ahead.submit(self._load, name)

    def _load(self, name: str) -> Picture:
        """Process a picture and keep it."""
        try:
            shown = load_video(name) if is_video(name) else load_picture(name)
            with naming(name):
                picture = self.process_video(shown) if isinstance(shown, Video) else self.process(shown)
            with self.reading:
                if name not in self.kept:
                    self.kept[name] = picture
                    self.kept_bytes += picture.num_bytes
                while self.kept_bytes > KEPT_BYTES and len(self.kept) > 1:
                    self.kept_bytes -= self.kept.popitem(last=False)[1].num_bytes
        finally:
            with self.reading:
                self.coming.pop(name, None)
        return picture

    def _outputs(self, images: list[Any], **options: Any) -> dict[str, Any]:
        """The image processor's output. It would guess the order of axes, wrongly for pictures of three rows."""
        return dict(self.processor(images=images, return_tensors="np", input_data_format="channels_last", **options))

    def process(self, pixels: np.ndarray) -> Picture:
        """Converts pixels, uint8 [H, W, 3], to the model's format."""
        raise NotImplementedError

    def process_video(self, video: Video) -> Picture:
        """Converts frames of a video to the model's format."""
        raise NotImplementedError

    def check_room(self, names: Sequence[str], most: int) -> None:
        """Refuse pictures with more than `most` tokens, by their sizes alone."""
        count = 0
        for name in names:
            with naming(name):
                count += self.tokens_of_size(*picture_size(name))
        if count > most:
            raise PictureError(f"the pictures have {count} tokens, and the longest conversation has {most}")

    def tokens_of_size(self, height: int, width: int) -> int:
        """The tokens of a picture with so many pixels."""
        raise NotImplementedError

    def opening(self) -> str:
        """The text for a picture without a chat template."""
        return self.placeholder

    def encode(self, text: str, names: Sequence[str]) -> list[int]:
        """The tokens of a text with a placeholder for each of these pictures."""
        first, *parts = text.replace(self.video_placeholder, self.placeholder).split(self.placeholder)
        if len(parts) != len(names):
            counts = f"{len(names)} pictures, and {self.placeholder} {len(parts)} times"
            raise PictureError(f"a conversation has {counts}: only a chat template writes that, where a picture is")
        tokens = self._text_tokens(first)
        for name, part in zip(names, parts):
            tokens += [*self.read(name).tokens, *self._text_tokens(part)]
        return tokens

    def _text_tokens(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []

    def for_vllm(self, picture: Picture) -> dict[str, np.ndarray]:
        """A picture's pixels with the names and shapes that vLLM's model takes."""
        return picture.pixels

    # Features and positions

    def positions(self, tokens: np.ndarray, names: Sequence[str]) -> np.ndarray:
        """Positions of the tokens of a conversation: int64 [n], or [n, 3] where pictures have rows and columns."""
        return np.arange(len(tokens))

    def features(self, model: Any, pictures: Sequence[Picture]) -> Tensor:
        """The vision tower's features [places, D] of these pictures, one after the other."""
        raise NotImplementedError

    def num_views(self, picture: Picture) -> int:
        """The number of a picture's tiles or moments. The tower sees each alone, and all have equally many places."""
        raise NotImplementedError

    def views(self, picture: Picture, first: int, last: int) -> Picture:
        """The tiles or moments first, ..., last - 1 of a picture, for `features`."""
        raise NotImplementedError

    def embed(self, model: Any, ids: Tensor, names: Sequence[str], ranks: DividedPass | None = None) -> Tensor:
        """The embeddings [..., D] of tokens whose picture places are numbered as by `number_places`. With `ranks`, the
        tokens are this rank's part of the rows and the ranks compute features together."""
        words = model.get_input_embeddings()(ids.clamp(min=0))
        if not names:  # ranks with shards of the tower's blocks must run these equally often
            sharded = hasattr(next(tower_blocks_of(model)[0].parameters()), "device_mesh")
            return words + 0 * self.features(model, [self.read(BLANK)]).sum() if sharded else words
        pictures = [self.read(name) for name in names]
        seen = self.features(model, pictures) if ranks is None else self.divided_features(model, pictures, ranks)
        return torch.where((ids < 0)[..., None], seen.to(words.dtype)[(-1 - ids).clamp(min=0)], words)

    def divided_features(self, model: Any, pictures: Sequence[Picture], ranks: DividedPass) -> Tensor:
        """The features of these pictures, divided over ranks: each rank computes successive tiles or moments with about
        equally many places, and sends its features to all other ranks.

        A picture of one tile and one of three on two ranks, all of the same size: rank 0 computes the first picture and
        the first tile of the second one, rank 1 the other two tiles.
        """
        group, views = ranks.group, [self.num_views(picture) for picture in pictures]
        counts = np.repeat([picture.places // count for picture, count in zip(pictures, views, strict=True)], views)
        looks = (np.cumsum(counts) - counts) * group.size // counts.sum()
        sizes = np.bincount(looks, counts, group.size).astype(int).tolist()
        of_rank = []
        for picture, ranks_of_views in zip(pictures, np.split(looks, np.cumsum(views)[:-1]), strict=True):
            first, last = np.searchsorted(ranks_of_views, [group.place, group.place + 1])
            if first < last:
                of_rank.append(self.views(picture, first, last))
        seen = self.features(model, of_rank or [self.read(BLANK)])[: sizes[group.place]]
        room = torch.nn.functional.pad(seen, (0, 0, 0, max(sizes) - len(seen)))
        came = travel(group, room.expand(group.size, -1, -1).flatten(1))().view(group.size, *room.shape)
        return torch.cat([rows[:size] for rows, size in zip(came, sizes, strict=True)])

    def number_places(self, tokens: np.ndarray, names: Sequence[str]) -> tuple[np.ndarray, list[str]]:
        """Numbers the picture places in tokens, int64 [n], over all different pictures; returns the tokens and these
        pictures' names, each once. Example with pictures of two places and one place, the first shown again at the end:
        -1 -2 5 -1 6 -1 -2 becomes -1 -2 5 -3 6 -1 -2.
        """
        numbers, different = tokens.astype(np.int64).ravel(), list(dict.fromkeys(names))
        ends = np.cumsum([self.read(name).places for name in different])
        first = {name: int(end) - self.read(name).places for name, end in zip(different, ends, strict=True)}
        places, of = numbers < 0, np.cumsum(numbers == FIRST_PLACE) - 1
        assert of[-1] + 1 == len(names), "a stream of tokens shows other pictures than are named"
        numbers[places] -= np.array([first[name] for name in names], np.int64)[of[places]]
        return numbers.reshape(tokens.shape), different


class QwenSight(Sight):
    """Qwen2.5-VL: a place for every two by two patches, and positions in rows and columns."""

    processor_class = "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl:Qwen2VLImageProcessorPil"
    decoder = "language_model"
    tower_blocks = "visual.blocks"
    two_axes = True

    @classmethod
    def patches_of_place(cls, config: Any) -> int:
        return config.vision_config.spatial_merge_size**2

    @classmethod
    def count_features(cls, model: Any, places: int) -> Tensor:
        tower, vision = model.base_model.visual, model.config.vision_config
        tower.set_attn_implementation(COUNTED)
        patches, numbers = places * cls.patches_of_place(model.config), tower.patch_embed.proj.weight[0].numel()
        hidden = tower.patch_embed(torch.empty(patches, numbers, dtype=tower.dtype, device="meta"))
        angles = hidden.new_empty(patches, vision.hidden_size // vision.num_heads)
        for block in tower.blocks:
            hidden = block(hidden, cu_seqlens=torch.tensor([0, patches]), position_embeddings=(angles, angles))
        return tower.merger(hidden)

    def opening(self) -> str:
        ends = self.tokenizer.convert_ids_to_tokens(
            [self.config.vision_start_token_id, self.config.vision_end_token_id]
        )
        return self.placeholder.join(ends)

    def process(self, pixels: np.ndarray) -> Picture:
        outputs = self._outputs([pixels])
        side = self.config.vision_config.spatial_merge_size
        _, height, width = outputs["image_grid_thw"][0].tolist()
        grid = 1, height // side, width // side
        return Picture(outputs, places_of(prod(grid)), grid)

    def process_video(self, video: Video) -> Picture:
        """A moment is a patch of two frames; a picture fills both. The last frame of an odd number counts twice."""
        vision, count = self.config.vision_config, len(video.frames)
        size, side = vision.temporal_patch_size, vision.spatial_merge_size
        outputs = self._outputs([*video.frames, *[video.frames[-1]] * (-count % size)])
        _, height, width = outputs["image_grid_thw"][0].tolist()
        patches = outputs["pixel_values"].reshape(
            -1, size, height * width, vision.in_channels, size, vision.patch_size**2
        )
        moments = len(patches)
        patches = patches[:, :, :, :, 0].transpose(0, 2, 3, 1, 4).reshape(moments * height * width, -1)
        pixels = {"pixel_values": patches, "image_grid_thw": np.array([[moments, height, width]])}
        grid = moments, height // side, width // side
        return Picture(pixels, places_of(prod(grid)), grid, vision.tokens_per_second * size * video.total_s / count)

    def tokens_of_size(self, height: int, width: int) -> int:
        return self.processor.get_number_of_image_patches(height, width) // self.patches_of_place(self.config)

    def positions(self, tokens: np.ndarray, names: Sequence[str]) -> np.ndarray:
        """A picture's positions begin after the text before it; the following text begins after the picture's longer
        side, or after a video's last moment if that is later (as published; transformers 5 counts sides alone).

        "5 6", a picture of one row and two columns, "7": time and row 0 1 2 2 4, column 0 1 2 3 4.
        """
        places, place, begin = np.repeat(np.arange(len(tokens))[:, None], 3, 1), 0, 0
        for start, name in zip(np.flatnonzero(np.asarray(tokens) == FIRST_PLACE), names, strict=True):
            places[begin:start] += place - begin
            place += start - begin
            moments, rows, columns = self.read(name).grid
            begin = start + moments * rows * columns
            time, row, column = np.indices((moments, rows, columns)).reshape(3, -1)
            time = (time.astype(np.float32) * np.float32(self.read(name).step)).astype(int)
            places[start:begin] = place + np.stack([time, row, column], 1)
            place += max(rows, columns, time[-1] + 1)
        places[begin:] += place - begin
        return places

    def num_views(self, picture: Picture) -> int:
        return picture.grid[0]

    def views(self, picture: Picture, first: int, last: int) -> Picture:
        patches, ((moments, *sides),) = picture.pixels["pixel_values"], picture.pixels["image_grid_thw"]
        some = patches.reshape(moments, -1, patches.shape[-1])[first:last].reshape(-1, patches.shape[-1])
        pixels = {"pixel_values": some, "image_grid_thw": np.array([[last - first, *sides]])}
        return replace(picture, pixels=pixels)

    def features(self, model: Any, pictures: Sequence[Picture]) -> Tensor:
        tower = model.base_model.visual
        pixels, grids = (
            tensor_of(np.concatenate([picture.pixels[key] for picture in pictures]), tower.device)
            for key in ("pixel_values", "image_grid_thw")
        )
        return tower(pixels.to(tower.dtype), grid_thw=grids).pooler_output


class IdeficsSight(Sight):
    """Idefics3 and SmolVLM: a fixed number of places for the whole picture, and for each tile of a large picture."""

    processor_class = "transformers.models.idefics3.image_processing_pil_idefics3:Idefics3ImageProcessorPil"
    decoder = "text_model"
    tower_blocks = "vision_model.encoder.layers"

    @classmethod
    def patches_of_place(cls, config: Any) -> int:
        return config.scale_factor**2

    @classmethod
    def count_features(cls, model: Any, places: int) -> Tensor:
        base, vision = model.base_model, model.config.vision_config
        tower, tile = base.vision_model, (vision.image_size // vision.patch_size) ** 2
        tower.set_attn_implementation(COUNTED)
        tiles, sides = -(-places * cls.patches_of_place(model.config) // tile), 2 * [vision.image_size]
        pixels = torch.empty(tiles, vision.num_channels, *sides, dtype=tower.dtype, device="meta")
        hidden = tower.embeddings.patch_embedding(pixels).flatten(2).transpose(1, 2)
        for block in tower.encoder.layers:
            hidden = block(hidden, attention_mask=None)
        return base.connector(tower.post_layernorm(hidden))

    def process(self, pixels: np.ndarray) -> Picture:
        outputs = self._outputs([[pixels]], return_row_col_info=True)
        rows, columns = (int(np.ravel(outputs.pop(key))[0]) for key in ("rows", "cols"))
        return Picture(outputs, self.tokens_of(rows, columns))

    def tokens_of_size(self, height: int, width: int) -> int:
        return len(self.tokens_of(*self.processor.get_number_of_image_patches(height, width)[1:]))

    def tokens_of(self, rows: int, columns: int) -> tuple[int, ...]:
        """The tokens of a picture that is cut into so many tiles."""
        text = "".join(
            "".join(
                f"<fake_token_around_image><row_{row}_col_{column}>{self.placeholder}"
                for column in range(1, columns + 1)
            )
            + "\n"
            for row in range(1, rows + 1)
        )
        return self.tokens_with_places(text + f"{bool(rows) * chr(10)}{self.one_tile}")

    @property
    def one_tile(self) -> str:
        """The text of a picture that is not cut."""
        return f"<fake_token_around_image><global-img>{self.placeholder}<fake_token_around_image>"

    def process_video(self, video: Video) -> Picture:
        """Each frame is one tile, one after the other."""
        outputs = self._outputs([[*video.frames]], do_image_splitting=False)
        return Picture(outputs, self.tokens_with_places(self.video_text(video)))

    def video_text(self, video: Video) -> str:
        return self.one_tile * len(video.frames)

    def tokens_with_places(self, text: str) -> tuple[int, ...]:
        """The tokens of a text in which a placeholder stands for a tile."""
        vision = self.config.vision_config
        count = (vision.image_size // vision.patch_size) ** 2 // self.config.scale_factor**2
        tokens, place = [], 0
        for number, words in enumerate(text.split(self.placeholder)):
            if number:
                tokens += range(-1 - place, -1 - place - count, -1)
                place += count
            tokens += self._text_tokens(words)
        return tuple(tokens)

    def for_vllm(self, picture: Picture) -> dict[str, np.ndarray]:
        """The tiles of all pictures stand one after the other there."""
        tiles = {key: array[0] for key, array in picture.pixels.items()}
        return tiles | {"num_patches": np.array([len(tiles["pixel_values"])])}

    def num_views(self, picture: Picture) -> int:
        return picture.pixels["pixel_values"].shape[1]

    def views(self, picture: Picture, first: int, last: int) -> Picture:
        return replace(picture, pixels={key: array[:, first:last] for key, array in picture.pixels.items()})

    def features(self, model: Any, pictures: Sequence[Picture]) -> Tensor:
        tiles, device = [picture.pixels for picture in pictures], next(model.parameters()).device
        options = {key: tensor_of(np.concatenate([tile[key] for tile in tiles], 1), device) for key in tiles[0]}
        options["pixel_values"] = options["pixel_values"].to(model.dtype)
        return model.base_model.get_image_features(**options).pooler_output.flatten(0, 1)


class SmolSight(IdeficsSight):
    processor_class = "transformers.models.smolvlm.image_processing_pil_smolvlm:SmolVLMImageProcessorPil"

    def video_text(self, video: Video) -> str:
        """The model's own words for a video, and the time before each frame."""
        count, total = len(video.frames), timedelta(seconds=int(video.total_s))
        text = f"You are provided the following series of {in_english(count)} frames from a {total} [H:MM:SS] video.\n"
        times = [divmod(int(second), 60) for second in video.seconds]
        return text + "".join(f"\nFrame from {m:02d}:{s:02d}:{self.one_tile}" for m, s in times) + "\n\n"


SMALL = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
)
NUMBERS = [*SMALL.split(), "eighteen", "nineteen"]
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()


def in_english(number: int) -> str:
    """A number below 100 in words."""
    if number < len(NUMBERS) or number > 99:
        return NUMBERS[number] if number < len(NUMBERS) else str(number)
    return TENS[number // 10 - 2] + (f"-{NUMBERS[number % 10]}" if number % 10 else "")


def places_of(count: int) -> tuple[int, ...]:
    """The tokens of so many places."""
    return tuple(range(-1, -1 - count, -1))


SIGHTS: dict[str, type[Sight]] = dict(zip(SEEING, (QwenSight, IdeficsSight, SmolSight), strict=True))
"""By config.json's model_type."""


def decoder_of(model: Any) -> Any:
    """The part of a model that reads tokens or their embeddings, without the head."""
    kind = SIGHTS.get(model.config.model_type)
    return getattr(model.base_model, kind.decoder) if kind else model.base_model


def tower_blocks_of(model: Any) -> list[Any]:
    """The blocks of a model's vision tower; none of a model that reads text alone."""
    kind = SIGHTS.get(model.config.model_type)
    return [*model.base_model.get_submodule(kind.tower_blocks)] if kind else []


def place_cost(model: Any) -> float:
    """Multiplications of the vision tower per place of a picture (several patches)."""
    kind = SIGHTS.get(model.config.model_type)
    weights = sum(p.numel() for block in tower_blocks_of(model) for p in block.parameters())
    return float(weights * kind.patches_of_place(model.config)) if kind else 0.0
