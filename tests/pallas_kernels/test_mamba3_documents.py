# SPDX-License-Identifier: Apache-2.0
"""Documents, padding and states of `mamba3_scan`: packed = apart, split = whole, nothing crosses.

Shapes stay the same from example to example (padding cuts instead of slices), so that each property
compiles once.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import Mamba3State, mamba3_scan
from pallas_kernels.mamba3_scan.shapes import TESTS, Sizes
from tests import tolerances
from tests.pallas_kernels.mamba3_inputs import (
    FAST_COMPILE,
    IMPLEMENTATIONS,
    PER_TOKEN,
    assert_same,
    in_float64,
    outputs_and_gradients,
    packed_ids,
    part,
    random,
    scan,
    state,
    turns,
)
from tests.tolerances import assert_close, norm_error

SISO = Sizes(b=2, t=21, h=4, p=2, n=6, g=2, a=2)
MIMO = Sizes(b=2, t=21, h=2, p=2, n=6, g=1, r=2, a=2)
EXAMPLES = settings(max_examples=15, deadline=None)


def assert_states_match(got: Mamba3State, wanted: Mamba3State, name: str = "") -> None:
    for field in Mamba3State._fields:
        pair = getattr(got, field), getattr(wanted, field)
        if field == "angle":
            pair = tuple(turns(angle) for angle in pair)
        assert_close(f"{name}{field}", *pair, 5 * tolerances.FP32_OUT, norm_error)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_packed_equals_apart(implementation):
    """T14: outputs and all four states of documents run alone, each from a state of its own."""
    sizes, lengths = TESTS["siso"], (5, 12, 1, 19)
    arrays = part(random(1, sizes), slice(1), slice(None))
    initial = state(2, sizes, 1, 4)
    seq_idx = np.repeat([2, 0, 3, 1], lengths)[None]
    y, final = scan(
        **arrays,
        seq_idx=seq_idx,
        initial_state=initial,
        num_documents=4,
        chunk_size=8,
        implementation=implementation,
    )
    end = 0
    for document, length in zip([2, 0, 3, 1], lengths, strict=True):
        start, end = end, end + length
        alone, alone_state = scan(
            **part(arrays, slice(None), slice(start, end)),
            initial_state=jax.tree.map(lambda v, i=document: v[:, i], initial),
            implementation="reference",
        )
        assert_close(f"y of {document}", y[:, start:end], alone, tolerances.FP32_OUT, norm_error)
        mine = jax.tree.map(lambda v, i=document: v[:, i], final)
        assert_states_match(mine, alone_state, f"document {document}: ")


@pytest.mark.parametrize("num_documents", [None, 5])
@pytest.mark.parametrize("sizes", [SISO, MIMO], ids=["siso", "mimo"])
@EXAMPLES
@given(seed=st.integers(0, 2**20), padding=st.sampled_from([0.0, 0.3, 1.0]))
def test_documents_and_padding(sizes, num_documents, seed, padding):
    """Every output and gradient of packed, padded rows against the float64 definition.

    But that of D: the sum of a whole batch, which for some seeds cancels to nothing.
    `test_stretches_of_several_chunks` has it for packed and padded rows.
    """
    arrays = random(seed, sizes)
    rows = (sizes.b,) if num_documents is None else (sizes.b, num_documents)
    initial = state(seed + 1, sizes, *rows)
    seq_idx = packed_ids(seed, sizes.b, sizes.t, num_documents or 4, padding)
    options = {"num_documents": num_documents}
    got = outputs_and_gradients(
        arrays, initial, seq_idx, implementation="xla", chunk_size=4, **options
    )
    wanted = in_float64(arrays, initial, seq_idx, **options)
    for _, gradients in (got, wanted):
        del gradients["D"]
    assert_same(got, wanted, 5 * tolerances.FP32_OUT, 5 * tolerances.FP32_GRAD)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("sizes", [SISO, MIMO], ids=["siso", "mimo"])
@EXAMPLES
@given(seed=st.integers(0, 2**20), cut=st.integers(0, 21), id_change=st.booleans())
def test_split_equals_whole(sizes, implementation, seed, cut, id_change):
    """Two calls joined by the state; ids of the second may differ, the state still enters."""
    arrays, initial = random(seed, sizes), state(seed + 1, sizes)
    time = np.arange(sizes.t)[None].repeat(sizes.b, axis=0)

    def run(seq_idx, initial):
        options = {"chunk_size": 4, "implementation": implementation}
        return scan(**arrays, seq_idx=seq_idx, initial_state=initial, **options)

    first, second = np.where(time < cut, 0, -1), np.where(time < cut, -1, 3 * id_change)
    whole, final = run(np.zeros_like(time), initial)
    y_first, between = run(first, initial)
    y_second, end = run(second, between)
    assert_close("y", y_first + y_second, whole, tolerances.FP32_OUT, norm_error)
    assert_states_match(end, final)
    if cut == 0:
        assert jax.tree.all(jax.tree.map(np.array_equal, between, initial))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_padding_counts_for_nothing(implementation):
    """NaN in padding reaches neither outputs nor gradients; the gradients of padding are zero."""
    sizes = MIMO
    arrays, initial = random(3, sizes), state(4, sizes)
    seq_idx = packed_ids(5, sizes.b, sizes.t, 4, 0.4)
    seq_idx[1, :] = -1
    is_padding = seq_idx < 0
    for name in PER_TOKEN:
        arrays[name][is_padding] = np.nan
    outputs, gradients = outputs_and_gradients(
        arrays, initial, seq_idx, implementation=implementation, chunk_size=4, num_documents=None
    )
    assert all(np.isfinite(v).all() for v in jax.tree.leaves((outputs, gradients)))
    assert not np.any(np.asarray(outputs["y"])[is_padding])
    for name in PER_TOKEN:
        assert not np.any(np.asarray(gradients[name])[is_padding]), name
    for field in Mamba3State._fields:
        assert np.array_equal(outputs[f"final.{field}"][1], getattr(initial, field)[1]), field


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_no_gradient_crosses_documents(implementation):
    """Not even that of a document which forgets nothing, nor through the look ahead."""
    sizes, border = SISO, 9
    arrays, initial = random(6, sizes), state(7, sizes)
    arrays["log_decay"][:] = 0
    seq_idx = np.repeat([[1, 0]], sizes.b, axis=0).repeat([border, sizes.t - border], axis=1)

    def second(arrays, initial):
        y, final = mamba3_scan(
            **arrays,
            seq_idx=seq_idx,
            initial_state=initial,
            chunk_size=4,
            implementation=implementation,
        )
        return jnp.sum(y[:, border:] ** 2) + sum(jnp.sum(v) for v in final)

    gradients, of_initial = jax.jit(jax.grad(second, (0, 1)), compiler_options=FAST_COMPILE)(
        arrays, initial
    )
    for name in PER_TOKEN:
        assert not np.any(np.asarray(gradients[name])[:, :border]), name
        assert np.any(np.asarray(gradients[name])[:, border:]), name
    assert not any(np.any(np.asarray(v)) for v in of_initial)


def test_gradients_pass_through_each_component_of_the_state():
    """T10: final state of block a → initial state of block b, one component at a time."""
    sizes = TESTS["siso"]
    arrays, initial = random(8, sizes), state(9, sizes)
    halves = [part(arrays, slice(None), cut) for cut in (slice(18), slice(18, 36))]

    def loss(first, passes, implementation):
        _, between = mamba3_scan(**first, initial_state=initial, implementation=implementation)
        stopped = jax.tree.map(jax.lax.stop_gradient, between)
        between = jax.tree.map(lambda s, v, m: s + m * (v - s), stopped, between, passes)
        y, final = mamba3_scan(**halves[1], initial_state=between, implementation=implementation)
        return jnp.sum(y**2) + jnp.sum(final.ssm**2)

    gradient = jax.jit(jax.grad(loss), static_argnums=2, compiler_options=FAST_COMPILE)
    for field in Mamba3State._fields:
        passes = Mamba3State(*(float(name == field) for name in Mamba3State._fields))
        got, wanted = (gradient(halves[0], passes, name) for name in ("xla", "reference"))
        assert any(np.any(np.asarray(v)) for v in wanted.values()), field
        for name, value in wanted.items():
            assert_close(f"{field}: {name}", got[name], value, 5e-5, norm_error)
