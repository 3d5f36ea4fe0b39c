# SPDX-License-Identifier: Apache-2.0
"""The parallel layers by themselves, without a language model around them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mamba_jax import (
    ColumnParallelLinear,
    Mamba3,
    RowParallelLinear,
    VocabParallelEmbedding,
    make_mesh,
    shard_model,
)
from tests.mamba_jax.models import ids
from tests.tolerances import assert_close
from train.loss import next_token_nats

TOKENS = ids(2, 8, 32)


def value_and_gradients(modules, function, *arguments):
    """function(modules, *arguments), and the gradients of its sum of squares."""

    def loss(modules):
        y = function(modules, *arguments)
        return jnp.sum(jnp.square(y)), y

    (_, y), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(modules)
    return y, nnx.to_pure_dict(nnx.state(grads))


def assert_same_alone(modules, mesh, function, *arguments):
    wanted = value_and_gradients(modules, function, *arguments)
    with jax.set_mesh(mesh):
        got = value_and_gradients(shard_model(modules, mesh), function, *arguments)
    pairs = zip(jax.tree.leaves_with_path(wanted), jax.tree.leaves(got), strict=True)
    for (path, a), b in pairs:
        assert_close(jax.tree_util.keystr(path), b, a, 1e-5)


@pytest.mark.multidevice
@pytest.mark.parametrize("sizes", [{"tensor": 4}, {"fsdp": 2, "tensor": 2, "sequence": 2}])
def test_an_mlp_of_a_column_and_a_row_parallel_layer(sizes):
    """Values and gradients of one device; the row layer's bias, far from zero, is added once."""
    rngs = nnx.Rngs(0)
    layers = nnx.List(
        [ColumnParallelLinear(16, 24, rngs=rngs), RowParallelLinear(24, 16, rngs=rngs)]
    )
    layers[1].bias[...] = 10 + jnp.arange(16.0)
    x = jax.random.normal(jax.random.key(1), (2, 8, 16))
    assert_same_alone(layers, make_mesh(**sizes), lambda m, x: m[1](jax.nn.relu(m[0](x))), x)


@pytest.mark.multidevice
def test_each_device_holds_its_part_of_a_layer():
    mesh = make_mesh(tensor=4)
    layer = shard_model(ColumnParallelLinear(16, 24, rngs=nnx.Rngs(0)), mesh)
    assert {s.data.shape for s in layer.kernel[...].addressable_shards} == {(16, 6)}
    assert {s.data.shape for s in layer.bias[...].addressable_shards} == {(6,)}
    layer = shard_model(RowParallelLinear(24, 16, rngs=nnx.Rngs(0)), mesh)
    assert {s.data.shape for s in layer.kernel[...].addressable_shards} == {(6, 16)}
    assert {s.data.shape for s in layer.bias[...].addressable_shards} == {(16,)}
    table = shard_model(VocabParallelEmbedding(32, 16, rngs=nnx.Rngs(0)), mesh)
    assert {s.data.shape for s in table.weight[...].addressable_shards} == {(8, 16)}


@pytest.mark.multidevice
def test_a_vocabulary_cut_over_devices():
    """Looking up, and the cross-entropy of a head that is cut as well; ids outside give NaN."""
    mesh = make_mesh(tensor=4)
    table = VocabParallelEmbedding(32, 16, std=1.0, rngs=nnx.Rngs(0))

    def nats(table, tokens):
        mask = jnp.ones(tokens.shape, bool)
        return next_token_nats(table(tokens), table.weight[...].T, tokens[:, ::-1], mask, chunk=4)

    assert_same_alone(table, mesh, lambda table, tokens: table(tokens), TOKENS)
    assert_same_alone(table, mesh, nats, TOKENS)
    with jax.set_mesh(mesh):
        outside = jax.jit(lambda e: e(TOKENS.at[0, 0].set(32).at[0, 1].set(-1)))(table)
    assert np.isnan(outside[0, :2]).all() and np.isfinite(outside[0, 2:]).all()


@pytest.mark.multidevice
def test_a_mixer_alone_on_a_mesh():
    mixer = Mamba3(16, d_state=4, headdim=4, rngs=nnx.Rngs(0))
    u = jax.random.normal(jax.random.key(1), (2, 8, 16))
    assert_same_alone(mixer, make_mesh(tensor=4, sequence=2), lambda mixer, u: mixer(u), u)


@pytest.mark.multidevice
@pytest.mark.parametrize(
    ("make", "axis"),
    [
        (lambda rngs: ColumnParallelLinear(16, 18, rngs=rngs), r"'inner' of .*bias.*, 18"),
        (lambda rngs: RowParallelLinear(18, 16, rngs=rngs), r"'inner' of .*kernel.*, 18"),
        (lambda rngs: VocabParallelEmbedding(30, 16, rngs=rngs), r"'vocab' of .*weight.*, 30"),
        (lambda rngs: Mamba3(12, d_state=4, headdim=4, rngs=rngs), r"'heads' of .*, 6"),
    ],
    ids=["columns", "rows", "vocabulary", "heads"],
)
def test_uneven_cuts_are_refused_with_the_numbers(make, axis):
    with pytest.raises(ValueError, match=rf"tensor axis must divide axis {axis}; got tensor=4"):
        shard_model(make(nnx.Rngs(0)), make_mesh(tensor=4))
