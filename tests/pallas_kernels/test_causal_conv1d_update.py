# SPDX-License-Identifier: Apache-2.0
"""`causal_conv1d_update`: golden numbers, steps against the sequence, slots, refusals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import causal_conv1d, causal_conv1d_update
from pallas_kernels.causal_conv1d_update import shapes
from tests import golden, tolerances
from tests.tolerances import assert_close, norm_error

IMPLEMENTATIONS = ["xla", "reference"]


@functools.partial(jax.jit, static_argnames=("activation", "implementation"))
def update(arrays, state_indices=None, *, activation="silu", implementation="xla"):
    options = {"activation": activation, "implementation": implementation}
    return causal_conv1d_update(**arrays, state_indices=state_indices, **options)


@functools.partial(jax.jit, static_argnames=("implementation",))
def values_and_gradients(arrays, state_indices, implementation="xla"):
    """All outputs and gradients by name, for cotangents that are the cosine of the outputs."""
    call = functools.partial(update, state_indices=state_indices, implementation=implementation)
    outputs, transpose = jax.vjp(call, arrays)
    (gradients,) = transpose(jax.tree.map(jnp.cos, outputs))
    named = dict(zip(("y", "new_state"), outputs, strict=True))
    return named | {f"d{name}": value for name, value in gradients.items()}


def inputs(slots=5, b=3, k=2, rows=4, e=6, w=4, dtype=np.float32):
    rng = np.random.default_rng(0)
    x = (b, e) if k is None else (b, k, e)
    sizes = {"state": (slots, rows, e), "x": x, "weight": (e, w), "bias": (e,)}
    return {name: rng.standard_normal(size).astype(dtype) for name, size in sizes.items()}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", golden.names("conv1d_update"))
def test_golden(name, implementation):
    case = golden.load(name)
    state = case.inputs["conv_state"]
    arrays = {k: v for k, v in case.inputs.items() if k in ("weight", "bias")}
    options = {"activation": case.options.get("activation"), "implementation": implementation}
    for step, x in enumerate(case.inputs["x"]):
        y, state = update(arrays | {"x": x, "state": state}, **options)
        assert_close("y", y, case.outputs["y"][step], tolerances.GOLDEN_OUT)
        assert_close("state", state, case.outputs["conv_state_after"][step], 0)


@pytest.mark.parametrize(
    ("sizes", "state_indices"),
    [
        ({}, [4, -1, 0]),
        ({"slots": 3, "k": None, "rows": 3}, None),
        ({"k": 6, "rows": 2, "w": 3}, [2, 3, 1]),
        ({"slots": 3, "rows": 0, "w": 1}, None),
    ],
)
def test_xla_equals_the_definition_in_float64(sizes, state_indices):
    arrays = inputs(**sizes)
    state_indices = None if state_indices is None else np.array(state_indices, np.int32)
    got = values_and_gradients(arrays, state_indices)
    with jax.enable_x64(True):
        wide = {name: value.astype(np.float64) for name, value in arrays.items()}
        wanted = values_and_gradients(wide, state_indices, implementation="reference")
    for name, value in wanted.items():
        assert value.dtype == np.float64
        limit = tolerances.FP32_GRAD if name.startswith("d") else tolerances.FP32_OUT
        assert_close(name, got[name], value, limit, norm_error)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("rows", [3, 5])
def test_steps_equal_the_sequence_after_prompts_of_any_length(rows, implementation):
    """Prompts shorter than the taps are where a misaligned state shows."""
    arrays = inputs(b=2, k=9, slots=2)
    x = arrays["x"]
    parameters = {"weight": arrays["weight"], "bias": arrays["bias"]}
    wanted, last = causal_conv1d(x, **parameters, activation="silu")
    for prompt in (1, 2, 3, 5):
        _, state = causal_conv1d(x[:, :prompt], **parameters, activation="silu")
        state = jnp.pad(state, ((0, 0), (rows - 3, 0), (0, 0)), constant_values=jnp.nan)
        for t in range(prompt, 9):
            y, state = update(
                parameters | {"x": x[:, t], "state": state}, implementation=implementation
            )
            np.testing.assert_allclose(y, wanted[:, t], atol=2e-6)
        np.testing.assert_array_equal(state[:, rows - 3 :], last)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_slots_of_nobody_stay_as_they_are(implementation):
    arrays = inputs()
    y, state = update(arrays, jnp.array([4, -1, 0]), implementation=implementation)
    assert not np.any(y[1])
    np.testing.assert_array_equal(state[1:4], arrays["state"][1:4])
    chosen = arrays | {"state": arrays["state"][[4, 0]], "x": arrays["x"][[0, 2]]}
    alone, rows = update(chosen, implementation=implementation)
    np.testing.assert_allclose(y[jnp.array([0, 2])], alone, atol=1e-6)
    np.testing.assert_array_equal(state[jnp.array([4, 0])], rows)


def test_dtypes_and_loops():
    arrays = inputs(slots=3, k=None, rows=3)
    arrays["x"] = jnp.asarray(arrays["x"], jnp.bfloat16)
    y, state = update(arrays)
    assert (y.dtype, state.dtype) == (jnp.bfloat16, jnp.float32)

    def step(state, x):
        y, state = update(arrays | {"state": state, "x": x})
        return state, y

    xs = jnp.stack([arrays["x"]] * 3)
    state, ys = jax.lax.scan(step, jnp.asarray(arrays["state"]), xs)
    together, final = update(arrays | {"x": jnp.moveaxis(xs, 0, 1)})
    np.testing.assert_array_equal(jnp.moveaxis(ys, 0, 1), together)
    np.testing.assert_array_equal(state, final)

    def row(state, x):
        one = arrays | {"state": state[None], "x": x[None]}
        return jax.tree.map(lambda v: v[0], update(one))

    mapped, _ = jax.vmap(row)(arrays["state"], arrays["x"])
    np.testing.assert_array_equal(mapped, y)


@pytest.mark.parametrize("name", shapes.SHAPES)
def test_named_shapes_trace(name):
    slots, b, k, rows, e, w = shapes.SHAPES[name].values()
    struct = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    y, state = jax.eval_shape(
        lambda s, x, weight, i: causal_conv1d_update(s, x, weight, state_indices=i),
        struct((slots, rows, e)),
        struct((b, k, e)),
        struct((e, w)),
        jax.ShapeDtypeStruct((b,), jnp.int32),
    )
    assert (y.shape, state.shape) == ((b, k, e), (slots, rows, e))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": np.zeros(6, "f")}, ValueError, r"x must have shape \(b, e or b, k, e\); got \(6,\)"),
        ({"x": np.zeros((3, 6), int)}, TypeError, "x must have a real floating dtype"),
        ({"state": np.zeros((5, 2, 6), "f")}, ValueError, r"state .* w-1=3; got \(5, 2, 6\)"),
        ({"state": np.zeros((5, 4, 7), "f")}, ValueError, r"state must have shape .* e=6"),
        ({"state": np.zeros((5, 4, 6), int)}, TypeError, "state must have a real floating dtype"),
        ({"state": np.zeros((5, 6), "f")}, ValueError, r"state must have shape \(slots, l, e\)"),
        ({"state_indices": None}, ValueError, r"state must have shape \(b, l, e\) with .*b=3"),
        ({"state_indices": np.zeros(2, int)}, ValueError, "state_indices must have shape"),
        ({"state_indices": np.zeros(3, "f")}, TypeError, "state_indices must have an integer"),
        ({"weight": np.zeros((5, 4), "f")}, ValueError, "weight must have shape"),
        ({"bias": np.zeros((5,), "f")}, ValueError, "bias must have shape"),
        ({"activation": "gelu"}, ValueError, "activation must be None, 'silu' or 'swish'"),
        ({"implementation": "triton"}, ValueError, "implementation must be None or one of xla"),
    ],
)
def test_bad_arguments_are_refused(change, error, message):
    arguments = inputs() | {"state_indices": np.array([0, 1, 2])} | change
    with pytest.raises(error, match=f"causal_conv1d_update: {message}"):
        causal_conv1d_update(**arguments)
