# SPDX-License-Identifier: Apache-2.0
"""How `ssd` may be called: refusals, transformations, repeatability, causality, memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import devices, explain, ssd
from tests import tolerances
from tests.pallas_kernels.ssd_inputs import (
    IMPLEMENTATIONS,
    filled,
    outputs_and_gradients,
    random,
)
from tests.tolerances import assert_close, norm_error


def replaced(**changes) -> dict:
    """Good arguments with some replaced; None leaves one out."""
    arguments = filled(2, 6) | changes
    return {name: value for name, value in arguments.items() if value is not None}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": np.zeros((2, 6, 4))}, ValueError, r"x must have shape \(b, t, h, p\)"),
        ({"x": np.zeros((2, 6, 4, 3), int)}, TypeError, "x must have a real floating dtype"),
        ({"x": [1.0]}, TypeError, "x must be an array"),
        ({"dt": np.zeros((2, 5, 4))}, ValueError, r"dt must have shape .* t=6.*got \(2, 5, 4\)"),
        ({"A": np.zeros((3,))}, ValueError, r"A must have shape \(h\) with h=4"),
        ({"A": np.zeros((4,), np.complex64)}, TypeError, "A must have a real floating dtype"),
        ({"B": np.zeros((2, 6, 3, 5), np.float32)}, ValueError, "g=2|g=3"),
        ({"B": np.zeros((2, 6, 2, 5), np.float16)}, TypeError, "B must have the dtype of x"),
        ({"C": np.zeros((2, 6, 2, 4), np.float32)}, ValueError, "C must have shape .*n=5"),
        ({"D": np.zeros((4, 2))}, ValueError, "D must have shape"),
        ({"z": np.zeros((2, 6, 4, 2), np.float32)}, ValueError, "z must have shape"),
        ({"dt_bias": np.zeros((4, 3))}, ValueError, "dt_bias must have shape"),
        ({"seq_idx": np.zeros((2, 7), int)}, ValueError, "seq_idx must have shape"),
        ({"seq_idx": np.zeros((2, 6))}, TypeError, "seq_idx must have an integer dtype"),
        ({"initial_state": np.zeros((2, 4, 5, 3))}, ValueError, "initial_state must have shape"),
        ({"initial_state": np.zeros((2, 1, 4, 3, 5))}, ValueError, "initial_state must have shape"),
        ({"dt_limit": (0.5, 0.1)}, ValueError, "dt_limit must be 0 <= lowest <= highest"),
        ({"dt_limit": (-1.0, 1.0)}, ValueError, "dt_limit must be 0 <= lowest"),
        ({"dt_limit": 3.0}, TypeError, "dt_limit must be two numbers"),
        ({"chunk_size": 0}, ValueError, "chunk_size must be at least 1; got 0"),
        ({"chunk_size": 16.0}, TypeError, "chunk_size must be an int or None"),
        ({"num_documents": 2}, ValueError, "num_documents needs seq_idx"),
        ({"num_documents": 0}, ValueError, "num_documents must be at least 1"),
        ({"implementation": "cuda"}, ValueError, "implementation must be None or one of"),
    ],
)
def test_refusals_name_the_argument(changes, error, message):
    with pytest.raises(error, match=message):
        ssd(**replaced(**changes))


def test_heads_that_groups_do_not_divide_are_refused():
    weights = np.zeros((2, 6, 3, 5), np.float32)
    with pytest.raises(ValueError, match="must divide h=4; got g=3"):
        ssd(**replaced(B=weights, C=weights))


def test_a_cpu_takes_xla():
    assert "xla" in str(explain(ssd, **filled(1, 3), device=devices.CPU))


def loss(arrays, **options):
    y, state = ssd(**arrays, dt_softplus=True, **options)
    return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.cos(state))


def test_transformations_agree():
    """vmap, remat and a scan around it give what jit alone gives, gradients too."""
    options = {"implementation": "xla", "chunk_size": 4}
    rows = [random(seed, 1, 9) for seed in (1, 2)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows)
    gradient = jax.grad(functools.partial(loss, **options))
    wanted = [jax.jit(gradient)(row) for row in rows]
    mapped = jax.jit(jax.vmap(gradient))(stacked)
    checkpointed = jax.checkpoint(functools.partial(loss, **options))
    rematerialised = jax.jit(jax.grad(checkpointed))(rows[0])

    def over_layers(stacked):
        def layer(total, row):
            return total + loss(row, **options), None

        return jax.lax.scan(layer, 0.0, stacked)[0]

    scanned = jax.jit(jax.grad(over_layers))(stacked)
    for name, value in wanted[0].items():
        tolerance = tolerances.FP32_GRAD
        assert_close(name, mapped[name][0], value, tolerance, norm_error)
        assert_close(name, mapped[name][1], wanted[1][name], tolerance, norm_error)
        assert_close(name, rematerialised[name], value, tolerance, norm_error)
        assert_close(name, scanned[name][0], value, tolerance, norm_error)


def test_twice_the_same_bits():
    arrays = random(3, 2, 50)
    first, second = (
        outputs_and_gradients(arrays, implementation="xla", chunk_size=16) for _ in range(2)
    )
    for got, wanted in zip(first, second, strict=True):
        for name in wanted:
            np.testing.assert_array_equal(got[name], wanted[name], err_msg=name)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_past_does_not_see_the_future(implementation):
    """Bits before a changed token stay; its own output and the later ones move."""
    arrays = filled(1, 21)
    changed = {name: np.array(value) for name, value in arrays.items()}
    for name in ("x", "dt", "B", "C", "z"):
        changed[name][:, 10] += 0.5
    run = jax.jit(
        lambda arrays: ssd(**arrays, dt_softplus=True, chunk_size=8, implementation=implementation)[
            0
        ]
    )
    before, after = run(arrays), run(changed)
    np.testing.assert_array_equal(before[:, :10], after[:, :10])
    assert np.all(np.any(np.asarray(before != after)[:, 10:], axis=(0, 2, 3)))


def test_backward_keeps_only_inputs_and_chunk_states():
    """Memory between forward and backward: y, the inputs, and a state per block of chunks."""
    b, t, h, p, n = 1, 512, 4, 16, 16
    arrays = random(4, b, t, h, p, 1, n)
    _, residual = jax.eval_shape(
        lambda arrays: jax.vjp(lambda a: ssd(**a, dt_softplus=True, chunk_size=16)[0], arrays),
        arrays,
    )
    kept = sum(leaf.size for leaf in jax.tree.leaves(residual))
    inputs = sum(np.size(value) for value in arrays.values())
    states = (t // 16) * b * h * p * n
    # Beside them: y before the gate and a handful of (b, t, h) arrays.
    assert kept <= inputs + states + b * t * h * p + 12 * b * t * h
