# SPDX-License-Identifier: Apache-2.0
"""The published sizes have the published numbers of parameters."""

import math

import jax
import pytest
from flax import nnx

from mamba_jax import MambaLMHeadModel
from mamba_jax.presets import PRESETS


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("mamba-130m", 129_135_360),
        ("mamba2-130m", 128_989_632),
        ("mamba2attn-2.7b", 2_697_590_880),
        ("mamba3-siso-187m", 186_849_600),
    ],
)
def test_parameters_are_as_many_as_published(name, parameters):
    shapes = jax.eval_shape(lambda: MambaLMHeadModel(PRESETS[name], rngs=nnx.Rngs(0)))
    leaves = jax.tree.leaves(nnx.state(shapes, nnx.Param))
    assert sum(math.prod(leaf.shape) for leaf in leaves) == parameters
