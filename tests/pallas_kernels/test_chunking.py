# SPDX-License-Identifier: Apache-2.0
"""Decays inside a chunk: plain loops in float64 say what the sums of `chunking` must be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import chunking, devices
from tests.tolerances import assert_close

LENGTHS = [1, 16, 17, 64, 300]


def log_decays(q: int) -> np.ndarray:
    """(2, 3, q), from hardly any decay to forgetting everything, also twice in one chunk."""
    r = np.random.default_rng(q)
    values = -np.exp(2 * r.normal(size=(2, 3, q))).astype(np.float32)
    values[0, 0, q // 3] = values[0, 1, [q // 4, -1]] = chunking.FORGETS
    return values


@pytest.mark.parametrize("q", LENGTHS)
def test_segment_decays(q):
    values = log_decays(q)
    wanted = np.zeros((2, 3, q, q))
    for i in range(q):
        for j in range(i + 1):
            wanted[..., i, j] = np.exp(values[..., j + 1 : i + 1].sum(-1, dtype=np.float64))
    assert_close("decays", jax.jit(chunking.segment_decays)(values), wanted, 3e-7)


@pytest.mark.parametrize("q", LENGTHS)
def test_gradient_of_segment_decays(q):
    values = log_decays(q)
    cotangent = np.random.default_rng(1).normal(size=(2, 3, q, q)).astype(np.float32)
    decays = jax.jit(chunking.segment_decays)(values)
    exponents = np.tril(cotangent * np.asarray(decays, np.float64), -1)
    weighted = jax.jit(jax.grad(lambda v: jnp.sum(chunking.segment_decays(v) * cotangent)))
    gradient = weighted(values)
    wanted = np.stack([exponents[..., k:, :k].sum((-1, -2)) for k in range(q)], -1)
    assert_close("cotangent", gradient, wanted, 1e-6)


def test_a_gradient_behind_a_forgotten_token_is_exact():
    """A difference of row and column sums would leave about 1e-7 of them: here exactly 0."""
    values = jnp.full((40,), -0.01).at[25].set(chunking.FORGETS)
    gradient = jax.jit(jax.grad(lambda v: jnp.sum(chunking.segment_decays(v))))(values)
    assert gradient[25] == 0
    others = np.delete(np.asarray(gradient), [0, 25])
    assert gradient[0] == 0 and np.all(others > 0)


@pytest.mark.parametrize("q", [1, 7, 40])
def test_sums(q):
    values = log_decays(q)[0, 2]
    through = np.cumsum(values, dtype=np.float64)
    after = np.concatenate([np.cumsum(values[::-1], dtype=np.float64)[::-1][1:], [0.0]])
    assert_close("through", chunking.sums_through(values), through, 1e-6)
    assert_close("after", chunking.sums_after(values), after, 1e-6)
    for forward, backward in (
        (chunking.sums_through, chunking.sums_from),
        (chunking.sums_after, chunking.sums_before),
    ):
        transpose = jax.linear_transpose(forward, values)
        np.testing.assert_allclose(backward(values), transpose(values)[0], rtol=1e-5)


def test_no_log_decay_below_forgetting_and_a_cut_at_starts():
    values = jnp.array([[[-1.0], [-1e30], [-2.0]]])
    starts = jnp.array([[False, False, True]])
    got = chunking.bounded_log_decay(values, starts)[0, :, 0]
    assert got.tolist() == [-1.0, chunking.FORGETS, chunking.FORGETS]
    gradient = jax.grad(lambda v: jnp.sum(chunking.bounded_log_decay(v, starts)))(values)
    assert gradient[0, :, 0].tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(("t", "q"), [(1, 4), (8, 4), (9, 4), (3, 1)])
def test_time_is_split_and_joined(t, q):
    values = jnp.arange(2.0 * t * 3).reshape(2, t, 3)
    chunks = chunking.split_time(values, q)
    assert chunks.shape == (2, -(-t // q), q, 3)
    np.testing.assert_array_equal(chunking.join_time(chunks, t), values)
    assert jnp.sum(chunks) == jnp.sum(values)


def test_sizes():
    assert chunking.choose_chunk_size(devices.CPU, 1000, 300) == 300
    assert chunking.choose_chunk_size(devices.CPU, 5, None) == 5
    assert chunking.choose_chunk_size(devices.CPU, 5, 7) == 5
    assert chunking.choose_chunk_size(devices.H200, 10_000, None) == 128
    # As many blocks as needed, all equally long: 20 chunks in two blocks of 10, not 16 and 4.
    assert chunking.chunks_per_block(devices.H200, 20, 1000) == 10
    assert chunking.chunks_per_block(devices.H200, 20, 2**40) == 1
