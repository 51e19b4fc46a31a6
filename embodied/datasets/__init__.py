"""Recorded episodes on disk, in the layout that LeRobot reads and writes (version 3.0): parquet, mp4 and metadata.

`DatasetWriter` writes one, `read_dataset` reads any. They need pyarrow (`pip install 'embodied-loop[datasets]'`) and no
torch.
"""

from embodied.datasets.layout import Features, features_of, fps_of, frame_of
from embodied.datasets.reader import Dataset, DatasetEpisode, read_dataset
from embodied.datasets.writer import DatasetWriter, EpisodeBuffer, buffer_name

__all__ = [
    "Dataset",
    "DatasetEpisode",
    "DatasetWriter",
    "EpisodeBuffer",
    "Features",
    "buffer_name",
    "features_of",
    "fps_of",
    "frame_of",
    "read_dataset",
]
