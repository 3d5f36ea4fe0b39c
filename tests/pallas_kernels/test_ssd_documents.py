# SPDX-License-Identifier: Apache-2.0
"""Documents, padding and states of `ssd`: packed = apart, split = whole, nothing crosses."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import seq_idx_from_cu_seqlens, ssd
from tests import tolerances
from tests.golden import fill
from tests.pallas_kernels.ssd_inputs import (
    IMPLEMENTATIONS,
    assert_same,
    filled,
    outputs_and_gradients,
    part,
    random,
)
from tests.tolerances import assert_close, norm_error

LENGTHS = (5, 20, 12)


def apart(arrays: dict, lengths, states=None) -> tuple[np.ndarray, np.ndarray]:
    """y and the final states of the documents of one packed row, each in a row of its own.

    Behind its document a row has steps of 0, so that nothing here relies on `seq_idx`.
    """
    starts = np.cumsum([0, *lengths])[:-1]
    rows = {name: value for name, value in arrays.items() if name != "initial_state"}
    for name in {"x", "dt", "B", "C", "z"} & set(arrays):
        fill_value = -1e9 if name == "dt" else 0.0
        shape = (len(lengths), max(lengths), *arrays[name].shape[2:])
        rows[name] = np.full(shape, fill_value, np.float32)
        for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            rows[name][row, :length] = arrays[name][0, start : start + length]
    rows |= {} if states is None else {"initial_state": states}
    y, final = definition(rows)
    return np.concatenate([y[row, :length] for row, length in enumerate(lengths)]), final


@jax.jit
def definition(arrays):
    return ssd(**arrays, dt_softplus=True, implementation="reference")


@pytest.mark.parametrize(
    ("implementation", "for_gpu"), [("reference", False), ("xla", False), ("xla", True)]
)
def test_boundaries_inside_a_chunk_with_a_state_each(implementation, for_gpu):
    """Three documents in chunks of 16, the numbers of three separate runs in float64."""
    arrays = filled(1, 37, z=False, state=False)
    arrays["initial_state"] = fill((3, 4, 3, 5), 9)[None]
    seq_idx = np.repeat([0, 1, 2], LENGTHS)[None]
    outputs, gradients = outputs_and_gradients(
        arrays,
        None,
        seq_idx,
        implementation=implementation,
        num_documents=3,
        chunk_size=16,
        for_gpu=for_gpu,
    )
    values = outputs["y"], outputs["final_state"]
    got = [float(jnp.sum(v)) for value in values for v in (value, jnp.abs(value))]
    np.testing.assert_allclose(got, [-2.845558, 165.054335, 0.619395, 34.382978], rtol=2e-5)
    y, finals = apart(arrays, LENGTHS, arrays["initial_state"][0])
    assert_close("y", outputs["y"][0], y, tolerances.FP32_OUT, norm_error)
    assert_close("states", outputs["final_state"][0], finals, tolerances.FP32_OUT, norm_error)
    assert np.all(np.abs(gradients["initial_state"]).max(axis=(0, 2, 3, 4)) > 1e-3)


@functools.partial(jax.jit, static_argnames="bounds")
def in_pieces(arrays, bounds):
    """Runs over the pieces between `bounds`, each from the state of the one before."""
    ys, state = [], arrays["initial_state"]
    for start, end in itertools.pairwise(bounds):
        piece = part(arrays, slice(None), slice(start, end)) | {"initial_state": state}
        y, state = ssd(**piece, dt_softplus=True, chunk_size=16, implementation="xla")
        ys.append(y)
    return jnp.concatenate(ys, axis=1), state


@pytest.mark.parametrize("k", [1, 15, 16, 17, 36])
def test_split_equals_whole(k):
    arrays = filled(1, 37, z=False)
    arrays["initial_state"] = np.zeros_like(arrays["initial_state"])
    y, state = in_pieces(arrays, (0, k, 37))
    got = [float(jnp.sum(v)) for value in (y, state) for v in (value, jnp.abs(value))]
    np.testing.assert_allclose(got, [3.945189, 160.246953, 0.068467, 8.729769], rtol=1e-4)


def test_gradients_of_split_equal_those_of_whole():
    @functools.partial(jax.jit, static_argnums=1)
    def with_gradients(arrays, bounds):
        (y, state), transpose = jax.vjp(lambda arrays: in_pieces(arrays, bounds), arrays)
        cotangents = jnp.asarray(fill(y.shape, 11)), jnp.asarray(fill(state.shape, 12))
        return {"y": y, "final_state": state}, transpose(cotangents)[0]

    arrays = filled(1, 37)
    split, whole = with_gradients(arrays, (0, 17, 37)), with_gradients(arrays, (0, 37))
    assert_same(split, whole, tolerances.FP32_OUT, tolerances.FP32_GRAD)


@pytest.mark.parametrize("lengths", [(3, 5, 6, 2), (0, 6, 1, 9), (9, 0, 7), (7, 9, 0)])
def test_packed_equals_apart(lengths):
    """Also with documents of no token, and a tail of padding."""
    arrays = random(1, 1, 19)
    del arrays["initial_state"]
    seq_idx = seq_idx_from_cu_seqlens(np.cumsum([0, *lengths]), 19)
    outputs, _ = outputs_and_gradients(arrays, None, seq_idx, implementation="xla", chunk_size=4)
    y, finals = apart(arrays, lengths)
    last = finals[max(i for i, length in enumerate(lengths) if length)]
    assert_close("y", outputs["y"][0, :16], y, tolerances.FP32_OUT, norm_error)
    assert not np.any(outputs["y"][0, 16:])
    assert_close("state", outputs["final_state"][0], last, tolerances.FP32_OUT, norm_error)


def same_as_above(implementation: str) -> dict:
    """Settings that `test_any_ids` has compiled already."""
    return {"implementation": implementation} | (
        {"chunk_size": 8, "for_gpu": False} if implementation == "xla" else {}
    )


ids = st.lists(st.integers(-1, 3), min_size=21, max_size=21)


@settings(max_examples=20, deadline=None)
@given(rows=st.tuples(ids, ids), sizes=st.sampled_from([(1, True), (8, False)]))
def test_any_ids(rows, sizes):
    """Ids in any order, padding anywhere, rows of padding: as the definition, whatever the id."""
    arrays, (chunk_size, for_gpu) = random(2, 2, 21), sizes
    seq_idx = np.array(rows)
    wanted = outputs_and_gradients(arrays, None, seq_idx, implementation="reference")
    got = outputs_and_gradients(
        arrays, None, seq_idx, implementation="xla", chunk_size=chunk_size, for_gpu=for_gpu
    )
    assert_same(got, wanted, tolerances.FP32_OUT, tolerances.FP32_GRAD)


@settings(max_examples=10, deadline=None)
@given(rows=st.tuples(ids, ids))
def test_any_ids_with_a_state_per_document(rows):
    arrays = random(2, 2, 21)
    arrays["initial_state"] = fill((2, 4, 4, 3, 5), 9)
    seq_idx = np.array(rows)
    settings_ = {"num_documents": 4, "implementation": "reference"}
    wanted = outputs_and_gradients(arrays, None, seq_idx, **settings_)
    settings_ |= {"implementation": "xla", "chunk_size": 4}
    got = outputs_and_gradients(arrays, None, seq_idx, **settings_)
    assert_same(got, wanted, tolerances.FP32_OUT, tolerances.FP32_GRAD)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_padding_is_as_if_it_were_not_there(implementation):
    """Before, inside and after a document; what stands there, even NaN, goes nowhere."""
    arrays = random(4, 2, 12)
    real = np.array([2, 3, 5, 6, 7, 10])
    seq_idx = np.full((2, 12), -1)
    seq_idx[:, real] = 7
    for name in ("x", "dt", "B", "C", "z"):
        junk = np.setdiff1d(np.arange(12), real)
        arrays[name][:, junk] = np.nan
    cotangents = {"y": fill((2, 12, 4, 3), 11), "final_state": fill((2, 4, 3, 5), 12)}
    got = outputs_and_gradients(
        arrays, cotangents, seq_idx, implementation=implementation, chunk_size=4
    )
    kept = part(arrays, slice(None), real)
    cotangents["y"] = cotangents["y"][:, real]
    wanted = outputs_and_gradients(kept, cotangents, implementation="reference")
    for results in got:
        for name in set(results) & {"y", "x", "dt", "B", "C", "z"}:
            assert not np.any(np.delete(results[name], real, axis=1)), name
            results[name] = results[name][:, real]
    assert_same(got, wanted, tolerances.FP32_OUT, tolerances.FP32_GRAD)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_row_of_padding_keeps_its_state(implementation):
    arrays = random(5, 2, 21)
    seq_idx = np.array([[-1] * 21, [3] * 21])
    outputs, gradients = outputs_and_gradients(
        arrays, None, seq_idx, **same_as_above(implementation)
    )
    np.testing.assert_array_equal(outputs["final_state"][0], arrays["initial_state"][0])
    np.testing.assert_array_equal(gradients["initial_state"][0], fill((2, 4, 3, 5), 12)[0])
    assert not np.any(outputs["y"][0]) and np.all(np.isfinite(outputs["y"]))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_no_gradient_crosses_documents(implementation):
    """A loss on the second document: exactly zero for the first and for the initial state."""
    arrays = random(6, 1, 20)
    seq_idx = np.repeat([4, 2], [9, 11])[None]
    cotangents = {"y": fill((1, 20, 4, 3), 11) * (np.arange(20) >= 9)[None, :, None, None]}
    _, gradients = outputs_and_gradients(
        arrays, cotangents, seq_idx, implementation=implementation, chunk_size=8
    )
    assert not np.any(gradients["initial_state"])
    for name in ("x", "dt", "B", "C", "z"):
        assert not np.any(gradients[name][:, :9]), name
        assert np.all(np.any(gradients[name][:, 9:] != 0, axis=(0, 2))), name


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gradients_through_states(implementation):
    """A = -1, step 0.1, ten tokens: what the initial state does, and a chain of two calls."""
    ones = np.ones((1, 10, 1, 2), np.float32)
    arrays = {"dt": np.full((1, 10, 1), 0.1, np.float32), "A": np.full((1,), -1, np.float32)}
    arrays |= {"B": ones, "C": ones}
    zeros = jnp.zeros((1, 10, 1, 1))

    def call(x, state):
        return ssd(x, **arrays, initial_state=state, chunk_size=4, implementation=implementation)

    state = jnp.zeros((1, 1, 1, 2))
    of_final = jax.grad(lambda state: jnp.sum(call(zeros, state)[1]))(state)
    of_y = jax.grad(lambda state: jnp.sum(call(zeros, state)[0]))(state)
    np.testing.assert_allclose(of_final, np.full_like(state, 0.36788), rtol=1e-4)
    np.testing.assert_allclose(of_y, np.full_like(state, 6.010412), rtol=1e-5)
    of_x = jax.grad(lambda x: jnp.sum(call(zeros, call(x, None)[1])[0]))(zeros)
    np.testing.assert_allclose(of_x[0, jnp.array([0, 9]), 0, 0], [0.488730, 1.202082], rtol=1e-5)
