# SPDX-License-Identifier: Apache-2.0
"""`mamba3_step`: a loop of it is `mamba3_scan`, slots, dtypes, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import Mamba3State, mamba3_step
from pallas_kernels.mamba3_step.shapes import TESTS
from tests import tolerances
from tests.pallas_kernels.mamba3_inputs import (
    FAST_COMPILE,
    IMPLEMENTATIONS,
    PER_TOKEN,
    assert_same,
    outputs_and_gradients,
    random,
    scan,
    state,
    turns,
)
from tests.tolerances import assert_close, norm_error

step = jax.jit(mamba3_step, static_argnames="implementation", compiler_options=FAST_COMPILE)


def token(arrays: dict, i: int) -> dict:
    """Token i of every per-token array."""
    return {k: v[:, i] if k in PER_TOKEN else v for k, v in arrays.items()}


def loop(*, implementation, chunk_size=None, seq_idx=None, initial_state=None, **arrays):
    """`mamba3_scan` as a loop of steps."""
    parameters = {k: v for k, v in arrays.items() if k not in PER_TOKEN}
    tokens = {k: jnp.moveaxis(v, 1, 0) for k, v in arrays.items() if k in PER_TOKEN}

    def step(state, inputs):
        y, state = mamba3_step(state, **inputs, **parameters, implementation=implementation)
        return state, y

    final, y = jax.lax.scan(step, initial_state, tokens)
    return jnp.moveaxis(y, 0, 1), final


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", TESTS)
def test_a_loop_of_steps_is_the_scan(name, implementation):
    """T12, T18: outputs, states and every gradient, with 1 < g < h and ranks 1, 2, 4."""
    sizes = TESTS[name]
    arrays, initial = random(1, sizes, mimo=name.startswith("mimo")), state(2, sizes)
    got = outputs_and_gradients(arrays, initial, None, op=loop, implementation=implementation)
    wanted = outputs_and_gradients(arrays, initial, None, implementation="xla")
    assert_same(got, wanted, tolerances.FP32_OUT, tolerances.FP32_GRAD)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_scan_then_steps_continues(implementation):
    """Prefill, then decode: the final state of the scan is the state of the step, as it is."""
    sizes = TESTS["mimo_rank2"]
    arrays = random(3, sizes)
    y, whole = scan(**arrays)
    prompt = {k: v[:, :3] if k in PER_TOKEN else v for k, v in arrays.items()}
    _, now = scan(**prompt)
    y_now, now = step(now, **token(arrays, 3), implementation=implementation)
    assert_close("y", y_now, y[:, 3], 5 * tolerances.FP32_OUT, norm_error)
    for field in Mamba3State._fields[1:]:
        pair = getattr(now, field), getattr(whole, field)
        assert_close(field, *pair, 5 * tolerances.FP32_OUT, norm_error)
    assert_close("angle", turns(now.angle), turns(whole.angle), 1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_slots(implementation):
    """Tokens advance the rows they name; a negative index gives 0 and changes nothing."""
    sizes = TESTS["siso"]
    arrays, slots = token(random(4, sizes), 0), state(5, sizes, 7)
    y, new = step(
        slots, **arrays, state_indices=np.asarray([5, -1, 2]), implementation=implementation
    )
    rows = np.asarray([5, 2])
    chosen = {k: v[[0, 2]] if k in PER_TOKEN else v for k, v in arrays.items()}
    wanted_y, wanted = step(
        jax.tree.map(lambda v: v[rows], slots), **chosen, implementation="reference"
    )
    assert not np.any(y[1])
    assert_close("y", y[np.asarray([0, 2])], wanted_y, tolerances.FP32_OUT, norm_error)
    for field in Mamba3State._fields:
        got, old = np.asarray(getattr(new, field)), getattr(slots, field)
        assert_close(field, got[rows], getattr(wanted, field), tolerances.FP32_OUT, norm_error)
        others = [0, 1, 3, 4, 6]
        assert np.array_equal(got[others], old[others]), field


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_bf16_state_keeps_its_dtypes_and_y_does_not_see_the_rounding(implementation):
    sizes = TESTS["siso"]
    arrays, exact = token(random(6, sizes), 0), state(7, sizes)
    rounded = exact._replace(ssm=exact.ssm.astype(jnp.bfloat16), B=exact.B.astype(jnp.bfloat16))
    widened = jax.tree.map(lambda v: v.astype(np.float32), rounded)
    y, new = step(rounded, **arrays, implementation=implementation)
    wanted, wide = step(widened, **arrays, implementation="reference")
    assert [v.dtype for v in new] == [v.dtype for v in rounded]
    assert_close("y", y, wanted, tolerances.FP32_OUT, norm_error)
    assert_close("ssm", new.ssm, wide.ssm, tolerances.BF16_OUT, norm_error)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_angles_stay_exact_over_many_steps(implementation):
    """T19 in decoding: the share of 4096 steps in the 5e-3 allowed after 65 536."""
    one = jnp.ones((1, 1))
    arrays = {
        "x": one[..., None],
        "dt": 0.05 * one,
        "log_decay": -one,
        "B": jnp.ones((1, 1, 1, 2)),
        "C": jnp.ones((1, 1, 1, 2)),
        "trap": one,
        "angles": one[..., None],
        "B_bias": jnp.zeros((1, 1, 2)),
        "C_bias": jnp.zeros((1, 1, 2)),
    }
    shapes = ((1, 1, 1), (1, 1, 1, 2), (1, 1, 1, 2), (1, 1, 1))
    empty = Mamba3State(*(jnp.zeros(shape) for shape in shapes))

    def step(_, state):
        return mamba3_step(state, **arrays, implementation=implementation)[1]

    run = jax.jit(lambda s: jax.lax.fori_loop(0, 4096, step, s), compiler_options=FAST_COMPILE)
    off = float(run(empty).angle[0, 0, 0])
    off -= np.pi * np.tanh(1.0) * np.float64(np.float32(0.05)) * 4096
    assert abs(off - 2 * np.pi * np.round(off / (2 * np.pi))) <= 5e-3 / 16


BAD = {
    "state must be a Mamba3State": lambda s: {"state": tuple(s)},
    "state.x must have shape (b, h, p)": lambda s: {"state": s._replace(x=s.x[:2])},
    "state_indices must have an integer dtype": lambda s: {"state_indices": np.zeros(3)},
    "x must have shape (b, h, p)": lambda s: {"x": np.zeros((3, 1, 4, 3), np.float32)},
    "implementation must be None or one of": lambda s: {"implementation": "mosaicc"},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_inputs_are_named(message):
    sizes = TESTS["siso"]
    arguments = {"state": state(8, sizes)} | token(random(9, sizes), 0)
    with pytest.raises((ValueError, TypeError)) as error:
        mamba3_step(**arguments | BAD[message](arguments["state"]))
    assert message in str(error.value)
