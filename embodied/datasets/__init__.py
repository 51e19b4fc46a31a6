"""Recorded episodes on disk, in the layout that LeRobot reads and writes (version 3.0): parquet, mp4 and metadata.

`DatasetWriter` writes one, `read_dataset` reads any. They need pyarrow (`pip install 'embodied-loop[datasets]'`) and no
torch.
"""

from embodied.datasets.episode_buffer import EpisodeBuffer, buffer_name
from embodied.datasets.lerobot_layout import Features, features_of, fps_of, frame_of
from embodied.datasets.reader import Dataset, RecordedEpisode, read_dataset
from embodied.datasets.writer import DatasetWriter

__all__ = [
    "Dataset",
    "DatasetWriter",
    "EpisodeBuffer",
    "Features",
    "RecordedEpisode",
    "buffer_name",
    "features_of",
    "fps_of",
    "frame_of",
    "read_dataset",
]
