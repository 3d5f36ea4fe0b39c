# SPDX-License-Identifier: Apache-2.0
"""What `ssd` computes: golden vectors, every gradient, chunks, groups, extreme steps, dtypes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import ssd
from pallas_kernels.ssd.shapes import SHAPES
from tests import golden, tolerances
from tests.pallas_kernels.ssd_inputs import (
    IMPLEMENTATIONS,
    assert_same,
    filled,
    outputs_and_gradients,
    part,
    random,
)
from tests.tolerances import assert_close, norm_error


def sums(outputs: dict) -> list[float]:
    """Sum and sum of absolute values of y and of the final state."""
    values = outputs["y"], outputs["final_state"]
    return [float(jnp.sum(v)) for value in values for v in (value, jnp.abs(value))]


def one_head(t: int, log_decay, step=1.0) -> dict:
    """b = h = p = n = 1, x = B = C = 1, with the given log decays (A carries the sign)."""
    dt = np.broadcast_to(np.asarray(log_decay, np.float32), (t,)) / -step
    ones = np.ones((1, t, 1, 1), np.float32)
    A = np.full((1,), -step, np.float32)
    return {"x": ones, "dt": dt.reshape(1, t, 1).copy(), "A": A, "B": ones, "C": ones}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", golden.names("ssd_"))
def test_golden(name, implementation):
    case = golden.load(name)
    renamed = {"initial_states": "initial_state", "final_states": "final_state"}
    narrow = {k: v.astype(np.float32) for k, v in case.inputs.items() if k != "seq_idx"}
    arrays = {renamed.get(k, k): v for k, v in narrow.items()}
    seq_idx = case.inputs.get("seq_idx")
    outputs, gradients = outputs_and_gradients(
        arrays,
        {renamed.get(k, k): v.astype(np.float32) for k, v in case.cotangents.items()},
        seq_idx,
        implementation=implementation,
        chunk_size=case.options["chunk_size_hint"],
        dt_softplus=case.options["dt_softplus"],
        dt_limit=tuple(case.options["dt_limit"] or (0.0, np.inf)),
    )
    for key in ("y", "final_states"):
        value = outputs[renamed.get(key, key)]
        assert_close(key, value, case.outputs[key], tolerances.GOLDEN_OUT)
    assert case.grads.keys() == {k for k in case.inputs if k != "seq_idx"}
    for key, value in case.grads.items():
        got = gradients[renamed.get(key, key)]
        assert_close(f"gradient of {key}", got, value, tolerances.GOLDEN_GRAD)
    if "varlen_states" in case.outputs:
        s = case.outputs["varlen_states"].shape[0]
        packed, _ = outputs_and_gradients(
            arrays, None, seq_idx, implementation=implementation, num_documents=s
        )
        states = packed["final_state"][0]
        assert_close("varlen_states", states, case.outputs["varlen_states"], tolerances.GOLDEN_OUT)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_numbers_of_the_original(implementation):
    """G3: gate, limits and initial state; G3b: three documents, the first with the state."""
    outputs, _ = outputs_and_gradients(
        filled(2, 13), implementation=implementation, dt_limit=(0.5, 1.0), chunk_size=4
    )
    np.testing.assert_allclose(
        sums(outputs), [-2.887240, 28.468927, -0.581921, 36.577006], rtol=1e-4
    )
    seq_idx = np.tile(np.repeat([0, 1, 2], [5, 4, 4]), (2, 1))
    outputs, _ = outputs_and_gradients(
        filled(2, 13, z=False), None, seq_idx, implementation=implementation, chunk_size=4
    )
    np.testing.assert_allclose(
        sums(outputs), [6.643056, 114.752956, -0.634421, 39.685375], rtol=1e-4
    )


EVERY_GRADIENT = {
    1: "2.140749 30.530464 7.12212 2.672339 2.335339 6.677773 1.862675 .996661 2.619411 2.412567 "
    "25.285781",
    65: "135.999587 32.249714 158.998585 29.642495 1.50895 124.076427 121.15364 5.709805 "
    "146.939627 3.816108 4.915718",
    200: "406.809431 22.324723 448.335616 85.39544 1.682461 341.982929 346.95167 8.34358 "
    "425.521691 8.795795 6.372717",
}


@pytest.mark.parametrize("chunk_size", [None, 16, 64, 256, 7])
@pytest.mark.parametrize("t", EVERY_GRADIENT)
def test_any_length_with_any_chunk_size(t, chunk_size):
    """Sums of absolute values, calculated in float64; a padded last chunk shows in the state."""
    implementation = "reference" if chunk_size is None else "xla"
    outputs, gradients = outputs_and_gradients(
        filled(2, t), implementation=implementation, chunk_size=chunk_size
    )
    order = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_state")
    arrays = [outputs["y"], outputs["final_state"], *(gradients[name] for name in order)]
    got = [float(jnp.sum(jnp.abs(array))) for array in arrays]
    wanted = [float(number) for number in EVERY_GRADIENT[t].split()]
    np.testing.assert_allclose(got, wanted, rtol=2e-5)


@settings(max_examples=5, deadline=None)
@given(
    t=st.sampled_from([1, 15, 16, 17, 37]),
    chunk_size=st.sampled_from([1, 5, 16, 20]),
    groups=st.sampled_from([1, 2, 4]),
    D=st.sampled_from([None, "h", "hp"]),
    z=st.booleans(),
    seed=st.integers(0, 99),
)
def test_xla_equals_the_definition(t, chunk_size, groups, D, z, seed):
    arrays = random(seed, 2, t, g=groups, D=D, z=z)
    wanted = outputs_and_gradients(arrays, implementation="reference")
    got = outputs_and_gradients(arrays, implementation="xla", chunk_size=chunk_size)
    assert_same(got, wanted, tolerances.FP32_OUT, tolerances.FP32_GRAD)


@pytest.mark.parametrize("for_gpu", [False, True])
def test_blocks_of_chunks(for_gpu):
    """A GPU takes several chunks at once and passes states by a product; t spans two blocks."""
    arrays = random(3, **SHAPES["blocks"])
    wanted = outputs_and_gradients(arrays, implementation="reference")
    got = outputs_and_gradients(arrays, implementation="xla", chunk_size=4, for_gpu=for_gpu)
    assert_same(got, wanted, tolerances.FP32_OUT, tolerances.FP32_GRAD)


def test_float32_against_the_definition_in_float64():
    arrays = random(5, 2, 70)
    got = outputs_and_gradients(arrays, implementation="xla", chunk_size=32)
    with jax.enable_x64(True):
        exact = {name: value.astype(np.float64) for name, value in arrays.items()}
        wanted = outputs_and_gradients(exact, implementation="reference")
        same = outputs_and_gradients(exact, implementation="xla", chunk_size=32)
        assert same[0]["y"].dtype == same[0]["final_state"].dtype == np.float64
        assert_same(same, wanted, 1e-14, 1e-13)
    assert got[0]["final_state"].dtype == jnp.float32
    assert_same(got, wanted, tolerances.FP32_OUT, tolerances.FP32_GRAD)


def test_bfloat16_products():
    arrays = random(6, 2, 150, p=16, n=16)
    narrow = {k: v.astype(jnp.bfloat16) if k in "xBCz" else v for k, v in arrays.items()}
    rounded = {k: np.asarray(v, np.float32) for k, v in narrow.items()}
    wanted = outputs_and_gradients(rounded, implementation="reference")
    got = outputs_and_gradients(narrow, implementation="xla")
    assert got[0]["y"].dtype == got[1]["x"].dtype == jnp.bfloat16
    assert got[0]["final_state"].dtype == got[1]["A"].dtype == jnp.float32
    assert_same(got, wanted, tolerances.BF16_OUT, tolerances.BF16_GRAD)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_no_overflow_above_the_diagonal(implementation):
    """A = -16 over one chunk of 256: a mask outside the exponential gives NaN in dA alone."""
    arrays = one_head(256, -16.0, step=16.0)
    outputs, gradients = outputs_and_gradients(
        arrays,
        {"y": np.ones((1, 256, 1, 1), np.float32)},
        implementation=implementation,
        chunk_size=256,
        dt_softplus=False,
    )
    assert_close("y[0]", outputs["y"][0, 0], np.ones((1, 1)), 1e-7)
    assert_close("y[255]", outputs["y"][0, 255], np.full((1, 1), 1.00000011), 2e-7)
    np.testing.assert_allclose(gradients["A"], 2.86965e-5, rtol=1e-3)
    np.testing.assert_allclose(gradients["x"][0, 0], 1.00000011, rtol=1e-6)
    wanted = [1.00000011, 0.99999831, 0.99999820]
    np.testing.assert_allclose(gradients["dt"][0, jnp.array([0, 1, 255]), 0], wanted, rtol=3e-7)


@pytest.mark.parametrize("decay", [-1e3, -1e6, -1e30])
def test_a_token_that_forgets_does_not_disturb_what_follows(decay):
    """Differences of one cumulative sum lose everything behind it, here even the gradients."""
    log_decay = np.full((40,), -0.01, np.float32)
    log_decay[[3, 20]] = decay
    arrays = one_head(40, log_decay)
    wanted = outputs_and_gradients(arrays, implementation="reference", dt_softplus=False)
    for chunk_size in (7, 40):
        got = outputs_and_gradients(
            arrays, implementation="xla", chunk_size=chunk_size, dt_softplus=False
        )
        assert_same(got, wanted, tolerances.FP32_OUT, tolerances.FP32_GRAD)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_step_is_an_exact_softplus(implementation):
    v = np.array([-30, -20, -17, -10, 0, 20, 20.01, 100, 1000], np.float32)
    step = [9.358e-14, 2.0612e-9, 4.13994e-8, 4.53989e-5, 0.693147, 20, 20.01, 100, 1000]
    ones = np.ones((9, 1, 1, 1), np.float32)
    arrays = {"x": ones, "dt": v.reshape(9, 1, 1), "A": np.full((1,), -1e-9, np.float32)}
    outputs, gradients = outputs_and_gradients(
        arrays | {"B": ones, "C": ones}, {"y": ones}, implementation=implementation
    )
    np.testing.assert_allclose(outputs["y"].ravel(), step, rtol=1e-4)
    np.testing.assert_allclose(gradients["dt"].ravel(), 1 / (1 + np.exp(-v)), rtol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_decay_beyond_float16_stays_finite(implementation):
    """A_log = 11.2: A = -exp(11.2) in float32, with half-precision activations."""
    arrays = filled(1, 9) | {"A": np.full((4,), -np.exp(np.float32(11.2)))}
    halves = {k: v.astype(np.float16) if k in "xBCz" else v for k, v in arrays.items()}
    outputs, gradients = outputs_and_gradients(halves, implementation=implementation)
    for name, value in (outputs | gradients).items():
        assert np.all(np.isfinite(value)), name


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_limits_stop_the_gradient_beyond_them_only(implementation):
    arrays = one_head(4, [-0.1, -0.3, -0.5, -0.7])
    _, gradients = outputs_and_gradients(
        arrays, implementation=implementation, dt_softplus=False, dt_limit=(0.3, 0.5)
    )
    moved = np.asarray(gradients["dt"][0, :, 0] != 0)
    assert moved.tolist() == [False, True, True, False]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_an_impulse_across_chunks(implementation):
    """Unequal decays over four chunks: a transposed decay matrix would show."""
    arrays = one_head(64, -0.001 * (np.arange(64) + 1))
    x = np.zeros((1, 64, 1, 1), np.float32)
    x[0, 0] = 1 / arrays["dt"][0, 0, 0]
    for for_gpu in (False, True):
        outputs, _ = outputs_and_gradients(
            arrays | {"x": x},
            implementation=implementation,
            chunk_size=16,
            dt_softplus=False,
            for_gpu=for_gpu,
        )
        got = outputs["y"][0, jnp.array([16, 48, 63]), 0, 0]
        np.testing.assert_allclose(got, [0.858988, 0.294052, 0.125055], rtol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_group_is_a_run_of_heads(implementation):
    x, B = np.ones((1, 1, 16, 2), np.float32), np.ones((1, 1, 4, 3), np.float32)
    C = np.zeros_like(B)
    C[:, :, 1] = 1
    zeros = np.zeros((1, 1, 16), np.float32)
    A = -np.ones((16,), np.float32)
    y, _ = ssd(x, zeros, A, B, C, dt_softplus=True, implementation=implementation)
    wanted = np.zeros((16, 2))
    wanted[4:8] = 2.0794415
    np.testing.assert_allclose(y[0, 0], wanted, rtol=1e-6)


def test_a_long_sequence():
    """65 536 tokens: the state after them is that of their last 1024, the rest has decayed."""
    arrays = random(7, **SHAPES["long"], z=False)
    outputs, gradients = outputs_and_gradients(arrays, implementation="xla")
    tail = part(arrays, slice(None), slice(-1024, None))
    wanted, _ = outputs_and_gradients(tail, implementation="reference")
    for name in ("y", "final_state"):
        got = outputs[name][:, -512:] if name == "y" else outputs[name]
        reference = wanted[name][:, -512:] if name == "y" else wanted[name]
        assert_close(name, got, reference, tolerances.FP32_OUT, norm_error)
    assert all(np.all(np.isfinite(value)) for value in gradients.values())


def test_many_rows_equal_their_halves():
    arrays = random(8, **SHAPES["many_rows"])
    whole = outputs_and_gradients(arrays, implementation="xla")[0]["y"]
    half = part(arrays, slice(1025, None), slice(None))
    other = outputs_and_gradients(half, implementation="xla")[0]["y"]
    np.testing.assert_array_equal(whole[1025:], other)


def test_sizes_beyond_2_31_elements_trace():
    sizes = SHAPES["beyond_2_31"]
    b, t, h, p, g, n = (sizes[axis] for axis in "bthpgn")

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    def loss(x, dt, A, B, C):
        return jnp.sum(ssd(x, dt, A, B, C, implementation="xla")[0].astype(jnp.float32))

    arguments = (
        array(b, t, h, p),
        array(b, t, h),
        array(h, dtype=jnp.float32),
        *[array(b, t, g, n)] * 2,
    )
    gradients = jax.eval_shape(jax.grad(loss, argnums=(0, 3)), *arguments)
    assert gradients[0].size > 2**31 and gradients[1].shape == (b, t, g, n)
