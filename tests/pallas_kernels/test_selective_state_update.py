# SPDX-License-Identifier: Apache-2.0
"""`selective_state_update`: golden numbers, every gradient, both forms, slots, refusals."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import explain, selective_state_update
from pallas_kernels.selective_state_update import shapes
from tests import golden, tolerances
from tests.golden import fill
from tests.tolerances import assert_close, norm_error

IMPLEMENTATIONS = ["xla", "reference"]


def per_channel(b=3, e=12, n=4, g=2, *, slots=None, seed=0):
    normal = np.random.default_rng(seed).standard_normal
    sizes = {"x": (b, e), "dt": (b, e), "B": (b, g, n), "C": (b, g, n), "D": (e,), "z": (b, e)}
    sizes |= {"dt_bias": (e,), "state": (slots or b, e, n), "A": (e, n)}
    arrays = {name: normal(size).astype(np.float32) for name, size in sizes.items()}
    return arrays | {"A": -np.exp(arrays["A"])}


def per_head(b=3, h=4, p=3, n=5, g=2, *, slots=None, wide=False, seed=0):
    """Parameters per head, or with `wide` per channel of a head."""
    normal = np.random.default_rng(seed).standard_normal
    sizes = {"x": (b, h, p), "dt": (b, h, p) if wide else (b, h), "B": (b, g, n), "C": (b, g, n)}
    sizes |= {"D": (h, p) if wide else (h,), "dt_bias": (h, p) if wide else (h,)}
    sizes |= {"A": (h, p, n) if wide else (h,), "z": (b, h, p), "state": (slots or b, h, p, n)}
    arrays = {name: normal(size).astype(np.float32) for name, size in sizes.items()}
    return arrays | {"A": -np.exp(arrays["A"])}


def complex_per_channel(**sizes):
    real, imaginary = per_channel(**sizes), per_channel(**sizes, seed=9)
    arrays = {k: real[k] + 1j * imaginary[k] for k in ("A", "B", "C", "state")}
    return real | {k: v.astype(np.complex64) for k, v in arrays.items()}


def update(arrays, **options):
    return selective_state_update(**arrays, **({"dt_softplus": True} | options))


@functools.partial(jax.jit, static_argnames=("implementation", "dt_limit"))
def values_and_gradients(arrays, state_indices=None, *, implementation="xla", **options):
    """Both outputs and all gradients by name, under fixed random cotangents."""
    options |= {"state_indices": state_indices, "implementation": implementation}
    outputs, transpose = jax.vjp(lambda a: update(a, **options), arrays)
    rng = np.random.default_rng(1)
    cotangents = tuple(jnp.asarray(rng.standard_normal(o.shape), o.dtype) for o in outputs)
    named = dict(zip(("y", "state"), outputs, strict=True))
    return named | {f"d{name}": value for name, value in transpose(cotangents)[0].items()}


# --- numbers of others --------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", golden.names("ssu_"))
def test_golden(name, implementation):
    case = golden.load(name)
    shared = {k: case.inputs[k] for k in ("A", "D", "dt_bias")}
    state = jnp.asarray(case.inputs["state"])
    run = jax.jit(functools.partial(update, implementation=implementation))
    for step in range(case.options["steps"]):
        now = {k: case.inputs[k][step] for k in ("x", "dt", "B", "C", "z")}
        y, state = run({"state": state} | now | shared)
        assert_close(f"y[{step}]", y, case.outputs["y"][step], tolerances.GOLDEN_OUT)
        wanted = case.outputs["state_after"][step]
        assert_close(f"state[{step}]", state, wanted, tolerances.GOLDEN_OUT)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_numbers_of_the_specification(implementation):
    arrays = {
        "state": fill((2, 4, 3, 5), 1),
        "x": fill((2, 4, 3), 2),
        "dt": fill((2, 4), 3),
        "A": -np.exp(fill((4,), 4)),
        "B": fill((2, 2, 5), 5),
        "C": fill((2, 2, 5), 6),
        "D": fill((4,), 7),
        "z": fill((2, 4, 3), 8),
        "dt_bias": fill((4,), 9),
    }
    y, state = (np.asarray(v) for v in update(arrays, implementation=implementation))
    assert np.allclose([y.sum(), abs(y).sum()], [0.544735, 1.501939], atol=1e-5)
    assert np.allclose([state.sum(), abs(state).sum()], [-1.426327, 40.500749], atol=1e-4)
    wanted = [0.0072821, -0.0349866, 0.0493820]
    assert np.allclose(y.ravel()[[0, 12, -1]], wanted, atol=1e-6)
    wanted = [0.1481827, -0.1379999, 0.2985623]
    assert np.allclose(state.ravel()[[0, 60, -1]], wanted, atol=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_heads_of_one_group_are_neighbours(implementation):
    """16 heads, 4 groups, C only in group 1: heads 4 ... 7 respond, with 3 ln 2."""
    C = np.zeros((1, 4, 3), np.float32)
    C[:, 1] = 1
    arrays = {
        "state": np.zeros((1, 16, 1, 3), np.float32),
        "x": np.ones((1, 16, 1), np.float32),
        "dt": np.zeros((1, 16), np.float32),
        "A": -np.ones(16, np.float32),
        "B": np.ones_like(C),
        "C": C,
    }
    y, _ = update(arrays, implementation=implementation)
    wanted = np.where((np.arange(16) >= 4) & (np.arange(16) < 8), 2.0794415, 0)
    assert np.allclose(y[0, :, 0], wanted, atol=1e-6)


# --- against the definition ---------------------------------------------------------------------

SLOTS = np.array([4, -1, 0], np.int32)
FORMS = {
    "per channel": (per_channel(**shapes.PER_CHANNEL["tiny"]), None),
    "per channel, a group each": (per_channel(g=12), None),
    "per channel in slots": (per_channel(slots=6), SLOTS),
    "per head": (per_head(**shapes.PER_HEAD["tiny"]), None),
    "per channel of a head": (per_head(wide=True), None),
    "per head in slots": (per_head(slots=6), SLOTS),
    "complex": (complex_per_channel(), None),
    "bare": ({k: v for k, v in per_head().items() if k not in ("D", "z", "dt_bias")}, None),
}


@pytest.mark.parametrize("form", FORMS)
def test_outputs_and_gradients_are_those_of_the_definition(form):
    arrays, indices = FORMS[form]
    got = values_and_gradients(arrays, indices)
    with jax.enable_x64(True):
        wide = {
            k: np.asarray(v, np.complex128 if np.iscomplexobj(v) else np.float64)
            for k, v in arrays.items()
        }
        wanted = values_and_gradients(wide, indices, implementation="reference")
        assert wanted["y"].dtype == np.float64
        wanted = jax.tree.map(np.asarray, wanted)
    for name in wanted:
        bound = tolerances.FP32_OUT if name in ("y", "state") else tolerances.FP32_GRAD
        assert_close(name, got[name], wanted[name], bound, norm_error)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_low_precision_state_is_kept_and_y_comes_from_the_unrounded_one(implementation):
    arrays = per_head()
    low = arrays | {"state": jnp.asarray(arrays["state"], jnp.bfloat16)}
    y, state = update(low, implementation=implementation)
    wide = arrays | {"state": np.asarray(low["state"], np.float32)}
    wanted_y, wanted_state = update(wide, implementation="reference")
    assert state.dtype == jnp.bfloat16 and y.dtype == jnp.float32
    assert_close("y", y, wanted_y, tolerances.FP32_OUT, norm_error)
    assert np.array_equal(state, wanted_state.astype(jnp.bfloat16))


def test_bf16_activations_round_once():
    arrays = per_channel()
    low = {k: jnp.asarray(arrays[k], jnp.bfloat16) for k in ("x", "dt", "B", "C", "z")}
    y, state = update(arrays | low)
    wide = {k: np.asarray(v, np.float32) for k, v in low.items()}
    wanted_y, wanted_state = update(arrays | wide, implementation="reference")
    assert y.dtype == jnp.bfloat16 and state.dtype == jnp.float32
    assert_close("y", y, wanted_y, tolerances.BF16_OUT, norm_error)
    assert_close("state", state, wanted_state, tolerances.FP32_OUT, norm_error)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("make", [per_channel, per_head])
def test_slots_choose_rows_and_negative_ones_change_nothing(make, implementation):
    arrays = make(slots=6)
    y, state = update(arrays, state_indices=SLOTS, implementation=implementation)
    assert not np.any(y[1])
    used = [4, 0]
    untouched = [row for row in range(6) if row not in used]
    assert np.array_equal(state[np.array(untouched)], arrays["state"][untouched])
    for token, row in zip((0, 2), used, strict=True):
        shared = {k: arrays[k] for k in ("A", "D", "dt_bias")}
        alone = {k: arrays[k][token : token + 1] for k in ("x", "dt", "B", "C", "z")}
        alone["state"] = arrays["state"][row : row + 1]
        wanted_y, wanted_state = update(alone | shared, implementation="reference")
        assert_close("y", y[token], wanted_y[0], tolerances.FP32_OUT, norm_error)
        assert_close("state", state[row], wanted_state[0], tolerances.FP32_OUT, norm_error)


def test_what_a_token_of_no_slot_holds_reaches_nothing():
    arrays = per_channel(slots=6)
    dirty = {k: arrays[k].copy() for k in ("x", "dt", "z")}
    for value in dirty.values():
        value[1] = np.nan
    for value in update(arrays | dirty, state_indices=SLOTS):
        assert np.isfinite(value).all()


# --- the step ------------------------------------------------------------------------------------


def steps(dt, A=-1.0, **options):
    """x = B = C = 1 from a zero state: y is the step itself."""
    one = np.ones((1, dt.size), np.float32)
    arrays = {"x": one, "dt": dt[None], "A": np.full((dt.size, 1), A, np.float32)}
    arrays |= {"B": one[:, :1], "C": one[:, :1], "state": np.zeros((1, dt.size, 1), np.float32)}
    return update(arrays, **options)[0][0]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_softplus_over_its_whole_range(implementation):
    values = np.array([-30, -20, -17, -10, 0, 20, 20.01, 100, 1000], np.float32)
    wanted = [9.358e-14, 2.0612e-9, 4.13994e-8, 4.53989e-5, 0.693147, 20, 20.01, 100, 1000]
    run = functools.partial(steps, implementation=implementation)
    assert np.allclose(run(values), wanted, rtol=1e-4, atol=0)
    slope = jax.grad(lambda dt: run(dt).sum())(values)
    assert np.allclose(slope, 1 / (1 + np.exp(-values.astype(np.float64))), rtol=1e-6)
    # The largest A of a float16 A_log; nothing overflows.
    assert np.isfinite(run(values, A=-7.336e4)).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_limit_holds_after_softplus(implementation):
    values = np.array([-9, 0, 9], np.float32)
    got = steps(values, dt_limit=(0.3, 0.8), implementation=implementation)
    assert np.allclose(got, [0.3, 0.693147, 0.8], atol=1e-6)


def test_the_default_limit_is_that_of_the_op_over_a_sequence():
    """None per channel, as in `selective_scan`; at 0 per head, as in `ssd`."""
    values = np.array([-0.5, 0.5], np.float32)
    assert np.allclose(steps(values, dt_softplus=False), values)
    arrays = per_head(p=1, n=1)
    arrays |= {"dt": np.full((3, 4), -5, np.float32), "dt_bias": np.zeros(4, np.float32)}
    _, state = update(arrays, dt_softplus=False)
    assert np.array_equal(state, arrays["state"])


# --- transformations ----------------------------------------------------------------------------


def test_many_tokens_are_its_halves():
    sizes = shapes.PER_HEAD["many_programs"]
    arrays = per_head(**sizes)
    half = sizes["b"] // 2
    run = jax.jit(update)
    whole = run(arrays)
    part = run({k: v[half:] if v.shape[0] == sizes["b"] else v for k, v in arrays.items()})
    for got, wanted in zip(part, whole, strict=True):
        assert np.array_equal(got, wanted[half:])


def test_vmap_and_two_runs():
    arrays = per_head()
    stacked = {k: np.stack([v, 2 * v if k != "A" else v]) for k, v in arrays.items()}
    together = jax.vmap(values_and_gradients)(stacked)
    alone = values_and_gradients({k: v[1] for k, v in stacked.items()})
    again = values_and_gradients({k: v[1] for k, v in stacked.items()})
    for name in alone:
        assert np.array_equal(alone[name], again[name]), name
        assert_close(name, together[name][1], alone[name], tolerances.FP32_GRAD, norm_error)


# --- choice and refusals ------------------------------------------------------------------------


def test_explain_names_the_choice():
    assert "xla" in str(explain(selective_state_update, **per_channel()))


CHANNEL_ERRORS = {
    "x must have shape (b, e)": {"x": np.zeros(12, np.float32)},
    "dt must have shape (b, e)": {"dt": np.zeros((3, 11), np.float32)},
    "A must have shape (e, n)": {"A": np.zeros(12, np.float32)},
    "B must have shape (b, n or b, g, n)": {"B": np.zeros(4, np.float32)},
    "state must have shape (b, e, n)": {"state": np.zeros((6, 12, 4), np.float32)},
    "state_indices must have shape (b)": {"state_indices": np.zeros(2, np.int32)},
    "state_indices must have an integer dtype": {"state_indices": np.zeros(3, np.float32)},
    "must divide e=12": {k: np.zeros((3, 5, 4), np.float32) for k in "BC"},
    "B may be complex only if A is": {"B": np.zeros((3, 2, 4), np.complex64)},
    "state must be complex where A is": {"A": np.zeros((12, 4), np.complex64)},
    "z must have the dtype of x": {"z": np.zeros((3, 12), np.float16)},
    "dt_limit must be a pair": {"dt_limit": (1.0, 0.5)},
    "implementation must be None or one of": {"implementation": "cuda"},
}
HEAD_ERRORS = {
    "dt must have shape (b, h or b, h, p)": {"dt": np.zeros(3, np.float32)},
    "A must have shape (h or h, p, n)": {"A": np.zeros((4, 3), np.float32)},
    "B must have shape (b, g, n)": {"B": np.zeros((3, 5), np.float32)},
    "D must have shape (h or h, p)": {"D": np.zeros((4, 3, 1), np.float32)},
    "state must have shape (b, h, p, n)": {"state": np.zeros((3, 4, 3, 6), np.float32)},
    "must divide h=4": {k: np.zeros((3, 3, 5), np.float32) for k in "BC"},
    "dt_limit must be a pair": {"dt_limit": math.inf},
}


@pytest.mark.parametrize(
    "arrays, message, bad",
    [(per_channel(), *item) for item in CHANNEL_ERRORS.items()]
    + [(per_head(), *item) for item in HEAD_ERRORS.items()],
    ids=[*CHANNEL_ERRORS, *HEAD_ERRORS],
)
def test_refusals_name_the_argument(arrays, message, bad):
    with pytest.raises((TypeError, ValueError)) as refused:
        selective_state_update(**(arrays | bad))
    assert message in str(refused.value) and "selective_state_update" in str(refused.value)
