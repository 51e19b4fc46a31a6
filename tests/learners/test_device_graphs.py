"""Which captured graphs are kept."""

import torch

from embodied.runtime.device_graphs import MOST, CapturedGraphs


def test_a_graph_in_use_is_kept_while_other_shapes_come_and_go():
    """As in an evaluation beside a rollout: its rows become fewer, those of the rollout do not."""
    graphs, calls = CapturedGraphs("cpu"), []

    def doubled(numbers):
        calls.append(len(numbers))
        return {"doubled": 2 * numbers}

    def run(rows):
        found = graphs.run("doubled", doubled, {"numbers": torch.ones(rows)}, [])
        assert found["doubled"].tolist() == [2.0] * rows

    run(100)
    run(100)
    called = calls.count(100)
    for rows in range(1, 3 * MOST):
        run(rows)
        run(100)
    assert calls.count(100) == called
