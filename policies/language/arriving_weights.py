"""A version of the weights that a trainer sends to a server in buckets, without a common folder."""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np

from embodied.runtime.published_weights import Blob, Bucket, Spec, TensorsFromBuckets

SILENT_S = 30.0  # after this silence another program may send weights


class ArrivingWeights:
    def __init__(self, sender: str, version: int, specs: Mapping[str, Spec], most_bytes: float) -> None:
        """Raises ValueError if the weights are larger than the model's, `most_bytes`."""
        if (size := sum(spec.size_bytes for spec in specs.values())) > 2 * most_bytes:
            raise ValueError(f"these weights have {size} bytes, and this model's have {most_bytes}")
        self.sender, self.number, self.heard = sender, 0, time.monotonic()
        self.blobs = {name: Blob(spec, np.zeros(spec.size_bytes, np.uint8)) for name, spec in specs.items()}
        self.tensors = TensorsFromBuckets(version, {name: blob.data for name, blob in self.blobs.items()})

    def is_in_the_way(self, sender: str) -> bool:
        """True if this version is still arriving from another sender."""
        return sender != self.sender and time.monotonic() - self.heard < SILENT_S

    def add(self, sender: str, bucket: Bucket) -> bool:
        """True if this is the next bucket."""
        if (sender, bucket.number) != (self.sender, self.number):
            return False
        self.tensors.add(bucket)
        self.number, self.heard = self.number + 1, time.monotonic()
        return True
