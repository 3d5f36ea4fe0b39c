# SPDX-License-Identifier: Apache-2.0
"""`selective_scan`: golden numbers, every gradient, packing, states, extremes, refusals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import explain, selective_scan, selective_state_update
from pallas_kernels.selective_scan import shapes, xla
from tests import golden, tolerances
from tests.golden import fill
from tests.tolerances import assert_close, max_error, norm_error

IMPLEMENTATIONS = ["xla", "reference"]
DEFAULTS = {
    "dt_softplus": True,
    "num_documents": None,
    "implementation": "xla",
    "chunk_size": None,
    "associative": None,
}


def inputs(b=2, t=37, e=12, n=4, g=2, *, documents=None, seed=0, **special):
    """Random arrays with realistic decays; `special` replaces some or, with None, drops them."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    rows = () if documents is None else (documents,)
    arrays = {
        "x": normal(b, t, e),
        "dt": normal(b, t, e),
        "A": -np.exp(normal(e, n)),
        "B": normal(b, t, g, n),
        "C": normal(b, t, g, n),
        "D": normal(e),
        "z": normal(b, t, e),
        "dt_bias": normal(e) - 1,
        "initial_state": normal(b, *rows, e, n),
    }
    return {k: v for k, v in (arrays | special).items() if v is not None}


def complex_inputs(**sizes):
    real, imaginary = inputs(**sizes), inputs(**sizes, seed=9)
    arrays = {k: real[k] + 1j * imaginary[k] for k in ("A", "B", "C", "initial_state")}
    return real | {k: v.astype(np.complex64) for k, v in arrays.items()}


def scan(arrays, seq_idx=None, **options):
    """`selective_scan` with softplus, compiled once for each set of shapes and options."""
    return _scan(arrays, seq_idx, **(DEFAULTS | options))


def values_and_gradients(arrays, seq_idx=None, cotangents=None, **options):
    """All outputs and gradients by name; the scalar is the sum of output * cotangent."""
    return _values_and_gradients(arrays, seq_idx, cotangents, **(DEFAULTS | options))


@functools.partial(jax.jit, static_argnames=tuple(DEFAULTS))
def _scan(arrays, seq_idx, *, chunk_size, associative, implementation, **options):
    if chunk_size is None:
        return selective_scan(**arrays, seq_idx=seq_idx, implementation=implementation, **options)
    optional = dict.fromkeys(("D", "z", "dt_bias", "initial_state"))
    return xla.run(
        **(optional | arrays | options),
        seq_idx=seq_idx,
        chunk_size=chunk_size,
        associative=associative,
    )


@functools.partial(jax.jit, static_argnames=tuple(DEFAULTS))
def _values_and_gradients(arrays, seq_idx, cotangents, **options):
    outputs, transpose = jax.vjp(lambda a: _scan(a, seq_idx, **options), arrays)
    if cotangents is None:
        cotangents = tuple(weights(output) for output in outputs)
    cotangents = (c.astype(o.dtype) for c, o in zip(cotangents, outputs, strict=True))
    (gradients,) = transpose(tuple(cotangents))
    named = dict(zip(("y", "final_state"), outputs, strict=True))
    return named | {f"d{name}": value for name, value in gradients.items()}


def weights(output):
    """A fixed random cotangent for an output."""
    rng = np.random.default_rng(1)
    value = rng.standard_normal(output.shape)
    if jnp.iscomplexobj(output):
        value = value + 1j * rng.standard_normal(output.shape)
    return jnp.asarray(value, output.dtype)


def in_float64(arrays, seq_idx=None, **options):
    """Outputs and gradients of the definition in float64."""
    with jax.enable_x64(True):
        wide = {
            k: np.asarray(v, np.complex128 if np.iscomplexobj(v) else np.float64)
            for k, v in arrays.items()
        }
        found = values_and_gradients(wide, seq_idx, implementation="reference", **options)
        return jax.tree.map(np.asarray, found)


def assert_all_close(got, wanted, out=tolerances.FP32_OUT, grad=tolerances.FP32_GRAD):
    assert got.keys() == wanted.keys()
    for name in got:
        bound = out if name in ("y", "final_state") else grad
        assert_close(name, got[name], wanted[name], bound, norm_error)


OVER_TIME = ("x", "dt", "B", "C", "z")
PACKED = np.array(
    [[0] * 5 + [-1] * 2 + [0] * 3 + [1] * 9 + [-1] + [2] * 17, [-1] * 3 + [4] * 20 + [7] * 14],
    np.int32,
)


# --- numbers of others --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, implementation",
    [(name, "xla") for name in golden.names("selscan_")]
    + [("selscan_full_L37", "reference"), ("selscan_complexA_L37", "reference")],
)
def test_golden(name, implementation):
    """Gradients of complex inputs are stored as dL/dRe + i dL/dIm, the conjugate of JAX's."""
    case = golden.load(name)
    renamed = {"u": "x", "delta": "dt", "delta_bias": "dt_bias"}
    arrays = {renamed.get(k, k): v for k, v in case.inputs.items()}
    cotangents = (case.cotangents["y"], np.zeros_like(case.outputs["last_state"]))
    got = values_and_gradients(
        arrays,
        None,
        cotangents,
        dt_softplus=case.options["delta_softplus"],
        implementation=implementation,
    )
    assert_close("y", got["y"], case.outputs["y"], tolerances.GOLDEN_OUT)
    assert_close(
        "final_state", got["final_state"], case.outputs["last_state"], tolerances.GOLDEN_OUT
    )
    for key, wanted in case.grads.items():
        gradient = np.conj(got[f"d{renamed.get(key, key)}"])
        assert_close(f"d{key}", gradient, wanted, tolerances.GOLDEN_GRAD)


def test_golden_state_in_the_middle():
    case = golden.load("selscan_full_L37")
    arrays = {"x": "u", "dt": "delta", "A": "A", "B": "B", "C": "C", "dt_bias": "delta_bias"}
    arrays = {ours: case.inputs[theirs] for ours, theirs in arrays.items()}
    head = between(arrays, 0, case.options["split"])
    _, state = scan(head)
    assert_close("state", state, case.outputs["state_at_split"], tolerances.GOLDEN_OUT)


def time_last(shape, seed):
    """The specification's fill in the original's (b, ..., t), brought to (b, t, ...)."""
    return np.moveaxis(fill(shape, seed), -1, 1)


def specification(t, bias=0.0):
    """Inputs of G2 and T4 with t tokens."""
    return {
        "x": time_last((2, 4, t), 1),
        "dt": time_last((2, 4, t), 2),
        "A": -np.exp(fill((4, 3), 3)),
        "B": time_last((2, 2, 3, t), 4),
        "C": time_last((2, 2, 3, t), 5),
        "D": fill((4,), 6),
        "z": time_last((2, 4, t), 7),
        "dt_bias": fill((4,), 8) + np.float32(bias),
    }


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_numbers_of_the_specification(implementation):
    y, state = scan(specification(9), implementation=implementation)
    assert np.allclose([y.sum(), abs(y).sum()], [-0.941093, 5.459957], atol=1e-5)
    assert np.allclose([state.sum(), abs(state).sum()], [-1.072679, 7.895365], atol=1e-5)
    y, state = np.moveaxis(np.asarray(y), 1, -1).ravel(), np.asarray(state).ravel()
    wanted = [0.0044333, -0.0068712, -0.0222499]
    assert np.allclose(y[[0, y.size // 2, -1]], wanted, atol=1e-6)
    wanted = [0.2266536, -0.6119109, 0.1926912]
    assert np.allclose(state[[0, state.size // 2, -1]], wanted, atol=1e-6)


RAGGED = {
    1: "1.163074/1.919921 1.315671/2.907203 .098969/.213159 0/0 2.609006/4.441111 "
    ".769926/1.837161 .45041/.467327 1.23251/2.286248 .098969/.186875",
    5: "-1.939103/6.402483 -2.811506/9.415077 -.21221/.741736 -.016651/.632622 "
    "-3.453814/12.851807 -4.581937/13.8074 .170859/1.481406 1.835093/6.379708 -.21221/.366373",
    129: "13.86915/295.857507 15.142304/293.966003 -2.045004/30.784518 .782267/6.521883 "
    "-50.601804/377.410875 8.051969/402.34824 -4.04595/4.04595 -33.001839/309.63265 "
    "-2.045004/2.660587",
}


@pytest.mark.parametrize("t", RAGGED)
def test_ragged_lengths_and_every_cotangent_apart(t):
    arrays = specification(t, bias=5)
    cotangents = (time_last((2, 4, t), 11), np.zeros((2, 4, 3)))
    got = values_and_gradients(arrays, None, cotangents)
    names = ("y", "dx", "ddt", "dA", "dB", "dC", "dD", "dz", "ddt_bias")
    for name, text in zip(names, RAGGED[t].split(), strict=True):
        wanted, size = (float(part) for part in text.split("/"))
        value = np.asarray(got[name], np.float64)
        assert abs(np.abs(value).sum() - size) <= 3e-5 * (1 + size), name
        assert abs(value.sum() - wanted) <= 3e-5 * (1 + size), name


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_constant_B_reaches_the_final_state(implementation):
    arrays = {
        "x": time_last((1, 2, 3), 1),
        "dt": time_last((1, 2, 3), 2),
        "A": -np.exp(fill((2, 3), 3)),
        "B": fill((2, 3), 4),
        "C": fill((2, 3), 4),
    }
    _, state = scan(arrays, implementation=implementation)
    assert np.allclose([state.sum(), abs(state).sum()], [0.843577, 1.22873], atol=1e-5)


# --- against the definition ---------------------------------------------------------------------

FORMS = {
    "plain": (inputs(), None, {}),
    "bare": (inputs(D=None, z=None, dt_bias=None, initial_state=None), None, {}),
    "a group per channel": (inputs(g=12), None, {}),
    "B without group axis": (inputs(B=inputs(g=1)["B"][:, :, 0]), None, {}),
    "constant B": (inputs(g=1, B=inputs()["A"]), None, {}),
    "constant B and C": (inputs(B=inputs()["A"], C=inputs(seed=3)["A"]), None, {}),
    "one token": (inputs(**shapes.SHAPES["one_token"]), None, {}),
    "complex": (complex_inputs(), None, {}),
    "complex, real B and C": (
        complex_inputs() | {k: inputs()[k] for k in ("B", "C", "initial_state")},
        None,
        {},
    ),
    "packed": (inputs(), PACKED, {}),
    "wide state": (inputs(t=9, n=40, e=4, C=inputs(n=40, e=4)["A"]), None, {}),
    "packed complex": (complex_inputs(), PACKED, {}),
    "documents": (inputs(documents=9), PACKED, {"num_documents": 9}),
    "documents, constant C": (
        inputs(documents=9, C=inputs()["A"], initial_state=None),
        PACKED,
        {"num_documents": 9},
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_outputs_and_gradients_are_those_of_the_definition(form):
    arrays, seq_idx, options = FORMS[form]
    got = values_and_gradients(arrays, seq_idx, **options)
    assert_all_close(got, in_float64(arrays, seq_idx, **options))
    for name, value in arrays.items():
        assert got[f"d{name}"].dtype == value.dtype, name


@pytest.mark.parametrize(
    "form, chunk_size, associative",
    [
        ("packed", 1, False),
        ("packed", 64, True),
        ("packed complex", 7, True),
        ("documents", 7, False),
        ("documents", 16, True),
    ],
)
def test_chunks_change_nothing(form, chunk_size, associative):
    arrays, seq_idx, options = FORMS[form]
    how = {"chunk_size": chunk_size, "associative": associative}
    got = values_and_gradients(arrays, seq_idx, **options, **how)
    assert_all_close(got, in_float64(arrays, seq_idx, **options))


def test_bf16_rounds_once():
    arrays = inputs(t=64)
    low = {k: jnp.asarray(arrays[k], jnp.bfloat16) for k in ("x", "dt", "B", "C", "z")}
    got = values_and_gradients(arrays | low)
    wanted = in_float64(arrays | {k: np.asarray(v, np.float32) for k, v in low.items()})
    assert got["y"].dtype == jnp.bfloat16 and got["final_state"].dtype == jnp.float32
    assert_all_close(got, wanted, tolerances.BF16_OUT, tolerances.BF16_GRAD)


def test_float64_stays_float64():
    with jax.enable_x64(True):
        arrays = {k: v.astype(np.float64) for k, v in inputs().items()}
        got = values_and_gradients(arrays, PACKED)
        wanted = values_and_gradients(arrays, PACKED, implementation="reference")
        assert all(value.dtype == jnp.float64 for value in got.values())
    assert_all_close(got, wanted, 1e-13, 1e-13)


# --- states -------------------------------------------------------------------------------------


def between(arrays, start, stop):
    """The tokens start ... stop of inputs whose other arrays have no time axis."""
    over_time = {k: v[:, start:stop] for k, v in arrays.items() if k in ("x", "dt", "z")}
    over_time |= {k: arrays[k][:, start:stop] for k in ("B", "C") if arrays[k].ndim > 2}
    return arrays | over_time


def test_a_split_sequence_is_the_whole():
    """Values and gradients, the state carried by hand."""
    arrays = inputs()

    @jax.jit
    def in_two(arrays):
        first, state = scan(between(arrays, 0, 23))
        second, state = scan(between(arrays, 23, 37) | {"initial_state": state})
        return jnp.concatenate([first, second], axis=1), state

    whole = values_and_gradients(arrays)
    parts, transpose = jax.vjp(in_two, arrays)
    (gradients,) = transpose(tuple(weights(output) for output in parts))
    got = dict(zip(("y", "final_state"), parts, strict=True))
    assert_all_close(got | {f"d{k}": v for k, v in gradients.items()}, whole)


@settings(max_examples=20, deadline=None)
@given(cut=st.integers(1, 36), seed=st.integers(0, 99))
def test_wherever_it_is_split(cut, seed):
    """Each part alone among padding, so that every cut has the same shapes."""
    arrays = inputs(seed=seed)
    is_first = np.broadcast_to(np.arange(37)[None] < cut, (2, 37))
    whole, final = scan(arrays, np.zeros((2, 37), np.int32))
    first, state = scan(arrays, np.where(is_first, 3, -1))
    second, state = scan(arrays | {"initial_state": state}, np.where(is_first, -1, 3))
    assert_close("y", first + second, whole, tolerances.FP32_OUT, norm_error)
    assert_close("final_state", state, final, tolerances.FP32_OUT, norm_error)


@pytest.mark.parametrize("form", ["plain", "complex"])
def test_a_loop_of_steps_is_the_sequence(form):
    arrays = FORMS[form][0]
    y, final = scan(arrays)
    shared = {k: arrays[k] for k in ("A", "D", "dt_bias")}
    over_time = {k: jnp.moveaxis(arrays[k], 1, 0) for k in ("x", "dt", "B", "C", "z")}

    def token(state, now):
        y, state = selective_state_update(state, **now, **shared, dt_softplus=True)
        return state, y

    state, steps = jax.lax.scan(token, jnp.asarray(arrays["initial_state"]), over_time)
    assert_close("y", jnp.moveaxis(steps, 0, 1), y, tolerances.FP32_OUT, norm_error)
    assert_close("state", state, final, tolerances.FP32_OUT, norm_error)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gradients_through_initial_and_final_state(implementation):
    arrays = {
        "x": np.zeros((1, 10, 1), np.float32),
        "dt": np.full((1, 10, 1), 0.1, np.float32),
        "A": -np.ones((1, 2), np.float32),
        "B": np.ones((1, 10, 2), np.float32),
        "C": np.ones((1, 10, 2), np.float32),
        "initial_state": np.zeros((1, 1, 2), np.float32),
    }
    run = functools.partial(scan, dt_softplus=False, implementation=implementation)
    final = jax.grad(lambda s: run(arrays | {"initial_state": s})[1].sum())
    outputs = jax.grad(lambda s: run(arrays | {"initial_state": s})[0].sum())
    assert np.allclose(final(arrays["initial_state"]), 0.36788, atol=1e-5)
    assert np.allclose(outputs(arrays["initial_state"]), 6.010412, atol=1e-5)

    def chained(x):
        _, state = run(arrays | {"x": x})
        return run(arrays | {"initial_state": state})[0].sum()

    dx = jax.grad(chained)(arrays["x"])
    assert np.allclose([dx[0, 0, 0], dx[0, -1, 0]], [0.488730, 1.202082], atol=1e-5)


# --- packing and padding ------------------------------------------------------------------------


@settings(max_examples=6, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    padding=st.integers(0, 3),
    own_states=st.booleans(),
    seed=st.integers(0, 99),
)
def test_packed_documents_are_documents_apart(lengths, padding, own_states, seed):
    """Values of each document, and no gradient across its borders."""
    s, t = len(lengths), 37
    ids = np.full((1, t), -1, np.int32)
    spans, start = [], padding
    for document, length in enumerate(lengths):
        ids[0, start : start + length] = document
        spans.append((start, start + length))
        start += length
    arrays = inputs(b=1, t=t, documents=4 if own_states else None, seed=seed)
    options = {"num_documents": 4 if own_states else None}
    y, final = scan(arrays, ids, **options)
    for document, (first, last) in enumerate(spans):
        alone = dict(arrays)
        if own_states:
            alone["initial_state"] = arrays["initial_state"][:, document]
        elif document:
            alone["initial_state"] = np.zeros_like(arrays["initial_state"])
        wanted_y, wanted_state = scan(alone, np.where(ids == document, ids, -1))
        got = y[:, first:last]
        assert_close("y", got, wanted_y[:, first:last], tolerances.FP32_OUT, norm_error)
        if own_states or document == s - 1:
            state = final[:, document] if own_states else final
            assert_close("state", state, wanted_state, tolerances.FP32_OUT, norm_error)
    assert not np.any(np.asarray(y)[ids < 0])
    first, last = spans[-1]
    inside = (np.arange(t) >= first) & (np.arange(t) < last)
    cotangent = (inside[None, :, None] * np.ones_like(y), np.zeros_like(final))
    dx = np.asarray(values_and_gradients(arrays, ids, cotangent, **options)["dx"])
    assert not np.any(dx[:, ~inside]) and np.any(dx[:, inside])


def test_a_document_that_does_not_occur_keeps_its_state():
    arrays, seq_idx, options = FORMS["documents"]
    got = values_and_gradients(arrays, seq_idx, **options)
    absent = [[i for i in range(9) if i not in row] for row in seq_idx]
    for row, documents in enumerate(absent):
        kept = got["final_state"][row, jnp.array(documents)]
        assert np.array_equal(kept, arrays["initial_state"][row, documents])
        cotangent = np.asarray(weights(got["final_state"]))[row, documents]
        assert np.array_equal(got["dinitial_state"][row, jnp.array(documents)], cotangent)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_row_of_padding_returns_its_state(implementation):
    arrays = inputs()
    ids = np.stack([np.full(37, -1), np.zeros(37)]).astype(np.int32)
    got = values_and_gradients(arrays, ids, implementation=implementation)
    assert not np.any(got["y"][0])
    assert np.array_equal(got["final_state"][0], arrays["initial_state"][0])
    assert np.array_equal(got["dinitial_state"][0], weights(got["final_state"])[0])
    for name in ("dx", "ddt", "dB", "dC", "dz"):
        assert not np.any(got[name][0]), name


def test_padding_is_as_if_it_were_not_there():
    arrays = inputs()
    y, state = scan(arrays, np.where(PACKED >= 0, 0, -1))
    for row in range(2):
        real = PACKED[row] >= 0
        alone = {k: v[row : row + 1][:, real] for k, v in arrays.items() if k in OVER_TIME}
        alone |= {k: arrays[k] for k in ("A", "D", "dt_bias")}
        alone["initial_state"] = arrays["initial_state"][row : row + 1]
        wanted_y, wanted_state = scan(alone, implementation="reference")
        assert_close("y", y[row, real], wanted_y[0], tolerances.FP32_OUT, norm_error)
        assert_close("state", state[row], wanted_state[0], tolerances.FP32_OUT, norm_error)


def test_what_padding_holds_reaches_nothing():
    """Even NaN, in values and gradients; and the first document may have any id."""
    arrays = inputs()
    dirty = {k: arrays[k].copy() for k in ("x", "dt", "B", "C", "z")}
    for value in dirty.values():
        value[PACKED < 0] = np.nan
    got = values_and_gradients(arrays | dirty, PACKED)
    wanted = values_and_gradients(arrays, PACKED + 5 * (PACKED >= 0))
    for name in got:
        assert np.array_equal(got[name], wanted[name]), name


# --- extremes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_softplus_over_its_whole_range(implementation):
    """x = B = C = 1 and one token: y is the step itself."""
    values = np.array([-30, -20, -17, -10, 0, 20, 20.01, 100, 1000], np.float32)
    wanted = [9.358e-14, 2.0612e-9, 4.13994e-8, 4.53989e-5, 0.693147, 20, 20.01, 100, 1000]
    one = np.ones((1, 1, 9), np.float32)

    def steps(dt):
        arrays = {"x": one, "dt": dt, "A": -np.ones((9, 1), np.float32)}
        arrays |= {"B": one[:, :, :1], "C": one[:, :, :1]}
        return scan(arrays, implementation=implementation)[0]

    y, transpose = jax.vjp(steps, values[None, None])
    assert np.allclose(y[0, 0], wanted, rtol=1e-4, atol=0)
    (dt,) = transpose(one)
    assert np.allclose(dt[0, 0], 1 / (1 + np.exp(-values.astype(np.float64))), rtol=1e-6)


@pytest.mark.parametrize("associative", [False, True], ids=["steps", "associative"])
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 999))
def test_extreme_steps_stay_finite(associative, seed):
    """dt from 1e-8 to 1e4 in one row and decays of fp16's largest A, values against float64."""
    rng = np.random.default_rng(seed)
    dt = 10 ** rng.uniform(-8, 4, (2, 37, 12)).astype(np.float32)
    A = -np.exp(rng.uniform(-3, 11.2, (12, 4))).astype(np.float32)
    arrays = inputs(dt=dt, A=A, dt_bias=None)
    got = values_and_gradients(arrays, dt_softplus=False, associative=associative, chunk_size=8)
    assert all(np.isfinite(value).all() for value in got.values())
    assert_all_close(got, in_float64(arrays, dt_softplus=False), 2e-6, 2e-5)


def test_a_huge_step_does_not_disturb_what_follows():
    """Nothing is left of the state before it, and x = 0 adds nothing: what follows starts anew."""
    arrays = inputs()
    dt, x = arrays["dt"].copy(), arrays["x"].copy()
    dt[:, 5], x[:, 5] = 1e6, 0
    whole = values_and_gradients(arrays | {"dt": dt, "x": x})
    assert all(np.isfinite(value).all() for value in whole.values())
    restarted = np.broadcast_to((np.arange(37) > 5)[None], (2, 37)).astype(np.int32)
    wanted, _ = scan(arrays | {"dt": dt, "x": x}, restarted)
    assert_close("y", whole["y"][:, 6:], wanted[:, 6:], tolerances.FP32_OUT, norm_error)


def test_long_sequence_of_few_channels():
    arrays = inputs(**shapes.SHAPES["long"], dt_bias=np.full(2, -4, np.float32))
    got = values_and_gradients(arrays)
    assert_all_close(got, in_float64(arrays), grad=2e-5)


@pytest.mark.parametrize("shape, axis", [("wide", "e"), ("many_rows", "b")])
def test_many_channels_or_rows_are_its_halves(shape, axis):
    sizes = shapes.SHAPES[shape]
    arrays = inputs(**sizes)
    y, state = scan(arrays)
    half = slice(sizes[axis] // 2, None)
    cut = {
        "e": {k: v if k in ("B", "C") else v[half] for k, v in arrays.items()}
        | {k: arrays[k][:, :, half] for k in ("x", "dt", "z")}
        | {"initial_state": arrays["initial_state"][:, half]},
        "b": {k: v[half] if v.shape[0] == sizes["b"] else v for k, v in arrays.items()},
    }[axis]
    half_y, half_state = scan(cut)
    where = (slice(None),) * (axis == "e") + (half,)
    assert np.array_equal(state[where], half_state)
    assert np.array_equal(y[:, :, half] if axis == "e" else y[half], half_y)


# --- transformations ----------------------------------------------------------------------------


def test_two_runs_are_bit_identical():
    arrays, seq_idx, options = FORMS["documents"]
    first = values_and_gradients(arrays, seq_idx, **options)
    second = values_and_gradients(arrays, seq_idx, **options)
    for name in first:
        assert np.array_equal(first[name], second[name]), name


def test_no_output_depends_on_later_tokens():
    arrays = inputs()
    y, _ = scan(arrays)
    for name in ("x", "dt", "B", "C", "z"):
        changed = arrays[name].copy()
        changed[:, 20] += 1
        later, _ = scan(arrays | {name: changed})
        assert np.array_equal(later[:, :20], y[:, :20]), name
        assert not np.array_equal(later[:, 20], y[:, 20]), name


def test_vmap_remat_and_scan_over_layers():
    arrays = inputs(t=9)
    stacked = {k: np.stack([v, 2 * v if k != "A" else v]) for k, v in arrays.items()}
    together = jax.vmap(values_and_gradients)(stacked)
    for i in range(2):
        alone = values_and_gradients({k: v[i] for k, v in stacked.items()})
        for name in alone:
            assert_close(name, together[name][i], alone[name], tolerances.FP32_GRAD, norm_error)

    def layers(x, remat):
        def layer(x, D):
            return scan(arrays | {"x": x, "D": D})[0], None

        layer = jax.checkpoint(layer) if remat else layer
        return jax.lax.scan(layer, x, stacked["D"])[0].sum()

    plain, saved = (jax.jit(jax.grad(layers), static_argnums=1)(arrays["x"], r) for r in (0, 1))
    assert_close("dx", saved, plain, 1e-6, max_error)


def test_complex_gradients_are_finite_differences():
    """Along random directions, in float64, for every complex argument."""
    arrays, seq_idx, _ = FORMS["packed complex"]
    with jax.enable_x64(True):
        wide = {
            k: np.asarray(v, np.complex128 if np.iscomplexobj(v) else np.float64)
            for k, v in arrays.items()
        }

        @jax.jit
        def loss(arrays):
            y, state = scan(arrays, seq_idx)
            return jnp.sum(y * weights(y)) + jnp.sum(state * weights(state)).real

        gradients = jax.grad(loss)(wide)
        rng = np.random.default_rng(2)
        for name in ("A", "B", "C", "initial_state", "dt"):
            shape = wide[name].shape
            ahead = rng.standard_normal(shape)
            if np.iscomplexobj(wide[name]):
                ahead = ahead + 1j * rng.standard_normal(shape)
            ends = [loss(wide | {name: wide[name] + h * ahead}) for h in (1e-6, -1e-6)]
            wanted = (ends[0] - ends[1]) / 2e-6
            got = np.sum(gradients[name] * ahead).real
            assert abs(got - wanted) <= 1e-6 * (1 + abs(wanted)), name


def test_states_over_time_are_never_in_memory_together():
    """Temporary memory of a gradient: a fraction of one array of all states, growing slowly."""

    def temporary_bytes(t):
        arrays = inputs(b=1, t=t, e=256, n=16, g=1)

        def loss(a):
            return jnp.sum(selective_scan(**a, dt_softplus=True, implementation="xla")[0])

        compiled = jax.jit(jax.grad(loss)).lower(arrays).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    short, long = temporary_bytes(2048), temporary_bytes(4096)
    all_states = 4096 * 256 * 16 * 4
    assert long < all_states
    assert long - short < all_states // 4


# --- choice and refusals ------------------------------------------------------------------------


def test_explain_names_the_choice():
    text = str(explain(selective_scan, **inputs()))
    assert "selective_scan" in text and "xla" in text


BAD = {
    "x must have shape (b, t, e)": {"x": np.zeros((2, 37), np.float32)},
    "dt must have shape (b, t, e)": {"dt": np.zeros((2, 36, 12), np.float32)},
    "A must have shape (e, n)": {"A": np.zeros((11, 4), np.float32)},
    "B must have shape (b, t, g, n)": {"B": np.zeros((2, 37, 2, 5), np.float32)},
    "C must have shape": {"C": np.zeros((4,), np.float32)},
    "D must have shape (e)": {"D": np.zeros((5,), np.float32)},
    "dt_bias must have shape (e)": {"dt_bias": np.zeros((1, 12), np.float32)},
    "initial_state must have shape (b, e, n)": {"initial_state": np.zeros((2, 4, 12), np.float32)},
    "seq_idx must have shape (b, t)": {"seq_idx": np.zeros((37,), np.int32)},
    "seq_idx must have an integer dtype": {"seq_idx": np.zeros((2, 37), np.float32)},
    "z must have the dtype of x": {"z": np.zeros((2, 37, 12), np.float16)},
    "x must have a real floating dtype": {"x": np.zeros((2, 37, 12), np.int32)},
    "A must have a floating or complex dtype": {"A": np.zeros((12, 4), np.int32)},
    "B may be complex only if A is": {"B": np.zeros((2, 37, 2, 4), np.complex64)},
    "initial_state may be complex only": {"initial_state": np.zeros((2, 12, 4), np.complex64)},
    "must divide e=12": {k: np.zeros((2, 37, 5, 4), np.float32) for k in "BC"},
    "num_documents needs seq_idx": {"num_documents": 3, "initial_state": None},
    "num_documents must be at least 1": {"num_documents": 0},
    "x must be an array": {"x": 1.0},
    "every axis of x must have at least 1 entry": {"x": np.zeros((2, 0, 12), np.float32)},
    "implementation must be None or one of": {"implementation": "cuda"},
}


@pytest.mark.parametrize("message", BAD)
def test_refusals_name_the_argument(message):
    with pytest.raises((TypeError, ValueError)) as refused:
        selective_scan(**(inputs() | BAD[message]))
    assert message in str(refused.value) and "selective_scan" in str(refused.value)
