import numpy as np
import pytest
import torch
from PIL import Image

from embodied.errors import CheckpointError, ConfigError
from embodied.policies.vla.images import HALVES, IMAGENET, ImageProcessor, processor_of


def picture(height, width, seed=0):
    """Smooth colours with edges."""
    y, x = np.mgrid[:height, :width]
    frame = np.stack([255 * y / height, 255 * x / width, 40.0 * ((x // 7 + y // 5) % 6)], -1)
    return frame.astype(np.uint8)


def grey_levels(processor, frame):
    """Back from SigLIP's numbers."""
    out = processor(torch.from_numpy(frame)[None])[0].permute(1, 2, 0).numpy()
    return (out * 0.5 + 0.5) * 255


@pytest.mark.parametrize("shape", [(100, 140), (40, 30), (64, 64)])
def test_resizing_stays_within_a_grey_level_of_pil(shape):
    frame = picture(*shape)
    wanted = np.asarray(Image.fromarray(frame).resize((64, 64), Image.Resampling.BICUBIC)).astype(float)
    assert np.abs(grey_levels(ImageProcessor(64, "resize-naive", (HALVES,)), frame) - wanted).max() < 1.01


def test_a_letterbox_has_bars_of_the_mean_colour():
    processor = ImageProcessor(32, "letterbox", (HALVES, IMAGENET))
    out = processor(torch.full((1, 16, 32, 3), 255, dtype=torch.uint8))
    assert out.shape == (1, 6, 32, 32)
    assert out[0, 0, 2, 5].item() == pytest.approx((127 / 255 - 0.5) / 0.5, abs=1e-6)  # int(255 * 0.5) = 127
    assert out[0, 0, 16, 5].item() == pytest.approx(1.0, abs=1e-6)
    assert out[0, 3, 16, 5].item() == pytest.approx((1 - 0.485) / 0.229, abs=1e-5)


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
    with pytest.raises(CheckpointError, match="2 images for 1 towers"):
        processor_of(stored, ["siglip"], 64, "letterbox", 1.0)
    with pytest.raises(ConfigError, match="resize-naive, letterbox"):
        ImageProcessor(64, "stretch", (HALVES,))
