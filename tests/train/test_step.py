# SPDX-License-Identifier: Apache-2.0
"""The train step: what it starts from, what it refuses, and that its options change no result."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.tolerances import FP32_GRAD, assert_close, norm_error
from tests.train import tiny
from train import step

B, T = 4, 16


def batch(seed=0):
    """Rows with documents, padding and a different number of real tokens each."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 257, (B, T + 1)).astype(np.int32)
    seq_idx = np.sort(rng.integers(0, 3, (B, T + 1)), axis=1).astype(np.int32)
    for row in range(B):
        seq_idx[row, T - 2 * row :] = -1
    same = (seq_idx[:, 1:] == seq_idx[:, :-1]) & (seq_idx[:, 1:] >= 0)
    return {
        "tokens": tokens[:, :-1],
        "targets": np.where(same, tokens[:, 1:], 0),
        "seq_idx": seq_idx[:, :-1],
        "loss_mask": same,
    }


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return tiny.config(tmp_path_factory.mktemp("run"), "unused")


@functools.cache
def initial_state(config):
    return step.init_state(config)


def fresh_state(config):
    """A copy of the initial state, since a step takes its argument's memory."""
    # What the options under test change has no part in the state.
    config = dataclasses.replace(
        config,
        optimizer=tiny.OPTIMIZER,
        compute_dtype="float32",
        remat=False,
        unroll=1,
        loss_chunk=256,
    )
    return jax.tree.map(jnp.copy, initial_state(config))


train_step_of = functools.cache(step.make_train_step)


def one_step(config, batch):
    return train_step_of(config)(fresh_state(config), batch)


def test_initial_step_sizes_and_decay_rates_are_in_their_ranges(config):
    """Case T25 a; all 0.6931 would be zeroed biases, 1.3133 ones, 1e-6 a wrong inverse."""
    mixer = fresh_state(config)["params"]["runs"][0]["mixer"]
    bias, A = np.asarray(mixer["dt_bias"]), -np.exp(np.asarray(mixer["A_log"]))
    dt = np.log1p(np.exp(bias))
    assert ((dt >= 0.000999) & (dt <= 0.1001)).all() and len(np.unique(dt)) == dt.size
    assert ((bias >= -6.91) & (bias <= -2.25)).all()
    assert ((A >= -16) & (A <= -1)).all()


def test_loss_is_the_mean_over_real_tokens(config):
    data = batch()
    _, found = one_step(config, data)
    assert found["tokens"] == data["loss_mask"].sum()
    # Embeddings of size 0.02 make all 264 tokens nearly equally probable.
    np.testing.assert_allclose(found["loss"], np.log(264), rtol=0.02)
    np.testing.assert_allclose(found["learning_rate"], 1e-2 / 2, rtol=1e-6)


@pytest.mark.parametrize(
    "change",
    [
        {"optimizer": dataclasses.replace(tiny.OPTIMIZER, accumulate=4)},
        {"remat": True},
        {"unroll": 2},
        {"loss_chunk": 5},
    ],
    ids=["accumulate", "remat", "unroll", "loss_chunk"],
)
def test_options_that_only_change_memory_or_speed_change_no_result(config, change):
    wanted, wanted_metrics = one_step(config, batch())
    got, got_metrics = one_step(dataclasses.replace(config, **change), batch())
    assert_close("loss", got_metrics["loss"], wanted_metrics["loss"], FP32_GRAD)
    assert_close("grad_norm", got_metrics["grad_norm"], wanted_metrics["grad_norm"], FP32_GRAD)
    # Adam's first update is the gradient's sign; its first moment is the gradient itself.
    for (path, a), b in zip(
        jax.tree.leaves_with_path(got["optimizer"][0].mu),
        jax.tree.leaves(wanted["optimizer"][0].mu),
        strict=True,
    ):
        assert_close(jax.tree_util.keystr(path), a, b, FP32_GRAD, norm_error)


def test_bf16_compute_keeps_fp32_masters_and_nearly_the_loss(config):
    _, wanted_metrics = one_step(config, batch())
    got, got_metrics = one_step(dataclasses.replace(config, compute_dtype="bfloat16"), batch())
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(got)}
    assert dtypes == {jnp.dtype("float32"), jnp.dtype("int32")}
    np.testing.assert_allclose(got_metrics["loss"], wanted_metrics["loss"], rtol=2e-3)


def test_a_step_that_is_not_finite_is_skipped_and_counted(config):
    train_step = train_step_of(config)
    good, _ = train_step(fresh_state(config), batch())
    before = jax.tree.map(np.asarray, good)
    # An id outside the vocabulary makes NaN of everything after it.
    bad = {**batch(), "tokens": np.full((B, T), 1000, np.int32)}
    for number in (1, 2):
        good, found = train_step(good, bad)
        assert not np.isfinite(found["loss"])
        assert (found["skipped"], found["bad_in_a_row"]) == (number, number)
    for part in ("params", "optimizer"):
        jax.tree.map(np.testing.assert_array_equal, good[part], before[part])
    good, found = train_step(good, batch(1))
    assert np.isfinite(found["loss"])
    assert (found["skipped"], found["bad_in_a_row"], good["step"]) == (2, 0, 4)
    # The schedule counts the steps that were taken.
    np.testing.assert_allclose(found["learning_rate"], 1e-2, rtol=1e-6)


def test_steps_repeat_bit_for_bit(config):
    first, second = one_step(config, batch()), one_step(config, batch())
    jax.tree.map(np.testing.assert_array_equal, first, second)


def test_no_gradient_crosses_documents(config):
    """The loss of one document does not depend on the tokens of another in its row."""
    data = batch()
    data["seq_idx"] = np.repeat(np.array([[0] * 8 + [1] * 8], np.int32), B, axis=0)
    data["loss_mask"] = (data["seq_idx"] == 1) & (np.arange(T) < T - 1)[None, :]
    other = {**data, "tokens": data["tokens"].copy()}
    other["tokens"][:, :8] = (other["tokens"][:, :8] + 1) % 257
    losses = [float(one_step(config, d)[1]["loss"]) for d in (data, other)]
    assert losses[0] == losses[1]
