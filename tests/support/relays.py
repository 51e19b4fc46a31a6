"""A role between players and learners that changes nothing and counts what passes."""

import numpy as np

from embodied.workflows.relay import RelayWorker


class Unchanged(RelayWorker):
    """Takes all parts of a batch together, or each by itself if its role streams."""

    count = 0

    def add(self, parts):
        self.count += len(parts)
        return parts

    def finish(self):
        count, self.count = self.count, 0
        return {"relay/parts_of_first": float(count), "relay/parts": float(self.all_reduce(np.array(count)))}
