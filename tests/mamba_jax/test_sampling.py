# SPDX-License-Identifier: Apache-2.0
"""Filters of logits against their definitions, and draws against probabilities."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mamba_jax.generation.sampling import (
    Sampling,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    keep_vocabulary,
    penalize_repetition,
    pick,
)
from tests.golden import fill


def kept(logits) -> list[list[int]]:
    return [np.flatnonzero(np.isfinite(row)).tolist() for row in np.atleast_2d(logits)]


def test_top_p_of_the_specification():
    logits = jnp.asarray(3 * fill((1, 8), 5))
    assert kept(keep_top_p(logits, 0.7)) == [[3, 6]]


@pytest.mark.parametrize("top_p", [1e-9, 0.1, 0.5, 0.9, 0.999])
def test_top_p_keeps_the_smallest_set_that_reaches_the_mass(top_p):
    logits = 2 * fill((5, 40), 3)
    for row, ids in zip(logits, kept(keep_top_p(jnp.asarray(logits), top_p)), strict=True):
        probability = np.exp(row.astype(np.float64))
        probability /= probability.sum()
        order = np.argsort(-probability)
        count = 1 + int(np.searchsorted(np.cumsum(probability[order]), top_p))
        assert sorted(order[:count].tolist()) == ids


def test_min_p_compares_with_the_most_likely_token_of_each_row():
    logits = jnp.log(jnp.array([[0.5, 0.3, 0.15, 0.05], [0.1, 0.2, 0.3, 0.4]]))
    assert kept(keep_min_p(logits, 0.29)) == [[0, 1, 2], [1, 2, 3]]
    assert kept(keep_min_p(logits, 1.0)) == [[0], [3]]


def test_top_k_keeps_k():
    logits = jnp.asarray(fill((3, 20), 2))
    for row, ids in zip(np.asarray(logits), kept(keep_top_k(logits, 4)), strict=True):
        assert sorted(np.argsort(-row)[:4].tolist()) == ids
    assert kept(keep_top_k(logits, 50)) == [list(range(20))] * 3


def test_repetition_penalty_counts_a_token_once_and_minds_the_sign():
    logits = jnp.array([[2.0, -2.0, 3.0, -3.0]])
    seen = jnp.array([[True, True, False, False]])
    np.testing.assert_allclose(penalize_repetition(logits, seen, 2.0), [[1.0, -4.0, 3.0, -3.0]])


def test_padding_of_the_vocabulary_is_never_picked():
    logits = jnp.array([[0.0, 1.0, 2.0, 9.0]])
    masked = keep_vocabulary(logits, 3)
    assert kept(masked) == [[0, 1, 2]]
    keys = jax.random.split(jax.random.key(0), 200)
    drawn = pick(jnp.repeat(masked, 200, axis=0), keys, Sampling(temperature=100.0))
    assert set(np.asarray(drawn).tolist()) == {0, 1, 2}


def test_filters_inside_jit_take_traced_numbers():
    logits = jnp.asarray(fill((2, 16), 4))
    for function in (keep_top_p, keep_min_p):
        np.testing.assert_array_equal(jax.jit(function)(logits, 0.3), function(logits, 0.3))


@pytest.mark.parametrize("top_k", [0, 4])
def test_draws_follow_the_filtered_distribution(top_k):
    """Frequencies of 40 000 draws within five standard deviations."""
    count = 40_000
    logits = jnp.asarray(3 * fill((1, 12), 6))
    sampling = Sampling(temperature=0.7, top_p=0.9, min_p=0.02)
    keys = jax.random.split(jax.random.key(1), count)
    drawn = pick(jnp.repeat(logits, count, axis=0), keys, sampling, top_k=top_k)
    wanted = keep_top_k(logits, top_k) if top_k else logits
    wanted = jax.nn.softmax(keep_min_p(keep_top_p(wanted / 0.7, 0.9), 0.02))[0]
    found = np.bincount(np.asarray(drawn), minlength=12) / count
    spread = np.sqrt(np.asarray(wanted) * (1 - np.asarray(wanted)) / count)
    assert (np.abs(found - np.asarray(wanted)) <= 5 * spread + 1e-9).all()


def test_greedy_and_top_1_are_the_most_likely_token():
    logits = jnp.asarray(fill((6, 30), 7))
    keys = jax.random.split(jax.random.key(0), 6)
    best = np.argmax(logits, axis=-1)
    np.testing.assert_array_equal(pick(logits, keys, Sampling()), best)
    hot = Sampling(temperature=5.0, top_p=0.5)
    np.testing.assert_array_equal(pick(logits, keys, hot, top_k=1), best)
