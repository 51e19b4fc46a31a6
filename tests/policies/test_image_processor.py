import io

import numpy as np
import pytest
import torch
from PIL import Image

from embodied.policies.vla.image_processor import (
    HALVES,
    IMAGENET,
    ImageProcessor,
    as_in_rlds,
    as_tensorflow,
    processor_of,
    resize,
    through_jpeg,
)


def picture(height, width, seed=0):
    """Smooth colours with edges."""
    y, x = np.mgrid[:height, :width]
    frame = np.stack([255 * y / height, 255 * x / width, 40.0 * ((x // 7 + y // 5) % 6)], -1)
    return frame.astype(np.uint8)


def grey_levels(processor, frame):
    """Back from SigLIP's numbers."""
    out = processor(torch.from_numpy(frame)[None])[0].permute(1, 2, 0).numpy()
    return (out * 0.5 + 0.5) * 255


@pytest.mark.parametrize("shape", [(100, 140), (40, 30), (64, 64), (300, 200)])
@pytest.mark.parametrize("mode", ["bicubic", "bilinear"])
def test_resized_images_equal_those_of_pillow(shape, mode):
    frame = np.random.default_rng(0).integers(0, 256, (*shape, 3), np.uint8)
    kernel = getattr(Image.Resampling, mode.upper())
    wide = Image.fromarray(frame).resize((64, shape[0]), kernel)  # across, then down: newer Pillows may turn that round
    wanted = np.asarray(wide.resize((64, 64), kernel)).astype(np.float32)
    out = resize(torch.from_numpy(frame).permute(2, 0, 1)[None].float(), (64, 64), mode)
    assert np.array_equal(out[0].permute(1, 2, 0).numpy(), wanted)


def test_halves_between_grey_levels_are_rounded_up():
    frame = torch.tensor([[[10.0, 11.0]] * 2]).expand(1, 3, 2, 2)  # means of 10 and 11: 10.5, of 20 and 21: 20.5
    assert resize(frame, (2, 1), "bilinear").unique().tolist() == [11.0]
    assert resize(frame + 10, (2, 1), "bilinear").unique().tolist() == [21.0]


def test_a_letterbox_has_bars_of_the_last_towers_mean_or_the_files_colour():
    processor = processor_of({}, ["dinov2", "siglip"], 32, "letterbox", 1.0)
    out = processor(torch.full((1, 16, 32, 3), 255, dtype=torch.uint8))
    assert out.shape == (1, 6, 32, 32)
    assert out[0, 3, 2, 5].item() == pytest.approx((127 / 255 - 0.5) / 0.5, abs=1e-6)  # int(255 * 0.5) = 127
    assert out[0, 0, 2, 5].item() == pytest.approx((127 / 255 - 0.485) / 0.229, abs=1e-5)
    assert out[0, 3, 16, 5].item() == pytest.approx(1.0, abs=1e-6)
    assert out[0, 0, 16, 5].item() == pytest.approx((1 - 0.485) / 0.229, abs=1e-5)
    stored = {"tvf_letterbox_fill": [10, 20, 30]}
    out = processor_of(stored, ["siglip"], 32, "letterbox", 1.0)(torch.zeros(1, 16, 32, 3, dtype=torch.uint8))
    assert ((out[0, :, 2, 5] * 0.5 + 0.5) * 255).round().tolist() == [10, 20, 30]
    with pytest.raises(ValueError, match="invalid literal"):
        processor_of({"tvf_letterbox_fill": "black"}, ["siglip"], 32, "letterbox", 1.0)


def test_a_letterbox_of_odd_sizes_is_resized_and_cut_as_the_published_processor_does():
    """torchvision's pad, resize of the short side, and center_crop, with Pillow: 45 x 32 becomes 45 x 44."""
    frame = np.random.default_rng(1).integers(0, 256, (32, 45, 3), np.uint8)
    padded = np.full((44, 45, 3), 127, np.uint8)
    padded[6:38] = frame
    wide = Image.fromarray(padded).resize((32 * 45 // 44, 44), Image.Resampling.BICUBIC)
    small = np.asarray(wide.resize((32, 32), Image.Resampling.BICUBIC))
    levels = grey_levels(ImageProcessor(32, "letterbox", (HALVES,)), frame)
    assert small.shape == (32, 32, 3) and np.allclose(levels, small, atol=0.01)


def test_frames_of_rlds_pass_through_jpeg_and_lanczos():
    frame = picture(80, 80)[None]
    file = io.BytesIO()
    Image.fromarray(frame[0]).save(file, "JPEG", quality=95, subsampling="4:2:0")
    stored = np.asarray(Image.open(file))
    assert np.array_equal(through_jpeg(torch.from_numpy(frame))[0].numpy(), stored) and (stored != frame[0]).any()
    wanted = np.asarray(Image.fromarray(stored).resize((48, 48), Image.Resampling.LANCZOS)).astype(int)
    out = as_in_rlds(torch.from_numpy(frame), 48)[0].numpy().astype(int)
    assert np.abs(out - wanted).max() <= 4 and np.abs(out - wanted).mean() < 0.5  # Pillow also rounds in between
    levels = grey_levels(ImageProcessor(48, "resize-naive", (HALVES,), rlds=True), frame[0])
    assert np.allclose(levels, out, atol=0.01)


def test_lanczos_is_tensorflows():
    """tf.image.resize(..., (4, 4), method="lanczos3", antialias=True) of TensorFlow 2.21.0, rounded."""
    line = torch.tensor([0, 40, 200, 255, 90, 10, 120, 60], dtype=torch.uint8)
    frame = line.view(1, 1, 8, 1).expand(1, 8, 8, 3)
    assert as_tensorflow(frame, 4)[0, 0, :, 0].tolist() == [27, 214, 76, 74]


def test_resize_crop_keeps_the_middle_of_a_wide_frame():
    frame = np.zeros((32, 96, 3), np.uint8)
    frame[:, 40:56] = 200
    levels = grey_levels(ImageProcessor(32, "resize-crop", (HALVES,)), frame)
    assert np.allclose(levels[:, 10:20], 200, atol=0.01) and np.allclose(levels[:, :4], 0, atol=0.01)


def test_a_crop_samples_as_tensorflow_does():
    frame = picture(16, 16)
    levels = grey_levels(ImageProcessor(16, "resize-naive", (HALVES,), crop_area=0.9), frame)
    reach = 0.9**0.5
    places = (1 - reach) / 2 * 15 + np.arange(16) * reach  # in pixels, from corner to corner
    low = np.clip(np.floor(places).astype(int), 0, 14)
    part = places - low
    rows = frame[low] * (1 - part)[:, None, None] + frame[low + 1] * part[:, None, None]
    wanted = rows[:, low] * (1 - part)[None, :, None] + rows[:, low + 1] * part[None, :, None]
    np.testing.assert_allclose(levels, np.floor(wanted / 255 * 255.5), atol=1.01)


def test_stored_numbers_come_before_the_usual_ones():
    stored = {
        "tvf_normalize_params": [{"mean": [0.484375] * 3, "std": [0.25] * 3}, {"mean": [0.5] * 3, "std": [1] * 3}]
    }
    kinds = ["dinov2", "siglip"]
    assert processor_of(stored, kinds, 64, "letterbox", 1.0).normalize[0] == ((0.484375,) * 3, (0.25,) * 3)
    assert processor_of({}, kinds, 64, "letterbox", 1.0).normalize == (IMAGENET, HALVES)
    with pytest.raises(ValueError, match="2 images for 1 towers"):
        processor_of(stored, ["siglip"], 64, "letterbox", 1.0)
    with pytest.raises(ValueError, match="resize-naive, letterbox"):
        processor_of({}, kinds, 64, "stretch", 1.0)


def steps(**changes):
    """preprocessor_config.json as the published processor writes it, for 64 pixels."""
    resized = {"antialias": True, "interpolation": 3, "max_size": None, "size": [64, 64]}
    written = {"image_resize_strategy": "resize-naive", "tvf_do_letterbox": False, "tvf_letterbox_fill": None}
    return written | {"tvf_resize_params": [resized | changes] * 2, "tvf_crop_params": [{"output_size": [64, 64]}] * 2}


def test_the_files_filter_is_used():
    frame = picture(90, 70)
    for number, mode in ((3, "bicubic"), (2, "bilinear")):
        processor = processor_of(steps(interpolation=number), ["siglip", "siglip"], 64, "letterbox", 1.0)
        wanted = resize(torch.from_numpy(frame).permute(2, 0, 1)[None].float(), (64, 64), mode)
        out = (processor(torch.from_numpy(frame)[None])[0, :3] * 0.5 + 0.5) * 255
        assert torch.allclose(out, wanted[0], atol=0.01)


@pytest.mark.parametrize(
    ("stored", "reason"),
    [
        (steps(size=[72, 72]), "which is not its image_resize_strategy=resize-naive for 64 pixels"),
        (steps(size=64), "not its image_resize_strategy"),
        (steps() | {"tvf_crop_params": [{"output_size": [48, 48]}]}, "not its image_resize_strategy"),
        (steps() | {"tvf_do_letterbox": True}, r"tvf_do_letterbox=True\), which is not its"),
        (steps() | {"tvf_resize_params": "small"}, "no attribute 'get'"),
        (steps(interpolation=0), "one filter"),
        (
            steps()
            | {"tvf_resize_params": [*steps()["tvf_resize_params"], *steps(interpolation=2)["tvf_resize_params"]]},
            "one filter",
        ),
    ],
)
def test_steps_that_are_not_those_of_the_strategy_are_refused(stored, reason):
    with pytest.raises((AttributeError, ValueError), match=reason):
        processor_of(stored, ["siglip", "siglip"], 64, "letterbox", 1.0)
    assert processor_of(steps(), ["siglip", "siglip"], 64, "letterbox", 1.0).filter == "bicubic"
    boxed = steps(size=64) | {"image_resize_strategy": "letterbox", "tvf_do_letterbox": True}
    assert processor_of(boxed, ["siglip", "siglip"], 64, "resize-naive", 1.0).strategy == "letterbox"
