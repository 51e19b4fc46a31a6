import numpy as np
import pytest
import torch
from needed import requires

from embodied.envs.maniskill.cpu_batch import FEW_ROWS, EpisodeDraws, RowsOfNormals, RowsOfUniforms

requires("mani_skill")


@pytest.mark.parametrize("num_rows", [3, 3 * FEW_ROWS], ids=["few", "many"])
def test_rows_draw_what_generators_of_their_own_draw_in_the_same_calls(num_rows):
    """Two calls each; among many rows are some whose pairs of normal numbers are rejected more often than usual."""
    seeds = np.random.default_rng(0).integers(0, 2**31 - 1, num_rows)
    draws = EpisodeDraws(seeds)
    normals, uniforms = RowsOfNormals(draws), RowsOfUniforms(draws, torch.device("cpu"))
    ours = [normals.normal(0.5, 0.02, (num_rows, 9)), normals.normal(0.0, 1.0, (num_rows, 2, 3))]
    ours += [uniforms((num_rows, 2)).numpy(), uniforms(num_rows).numpy()]
    for row, seed in enumerate(seeds.tolist()):
        numpy, mersenne = np.random.RandomState(seed), torch.Generator().manual_seed(seed)
        theirs = [numpy.normal(0.5, 0.02, 9), numpy.normal(0.0, 1.0, (2, 3))]
        theirs += [torch.rand(2, generator=mersenne).numpy(), torch.rand((), generator=mersenne).numpy()]
        for all_rows, own in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(all_rows[row], own)
