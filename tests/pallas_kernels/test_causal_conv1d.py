# SPDX-License-Identifier: Apache-2.0
"""`causal_conv1d`: golden numbers, every gradient, packing, padding, states, refusals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import causal_conv1d, devices, explain, seq_idx_from_cu_seqlens
from pallas_kernels.causal_conv1d import shapes
from tests import golden, tolerances
from tests.golden import fill
from tests.tolerances import assert_close, norm_error

IMPLEMENTATIONS = ["xla", "reference"]


def inputs(b=2, t=9, e=5, w=4, *, documents=None, dtype=np.float32, seed=0):
    """Random arrays; with `documents` initial states for each of that many."""
    rng = np.random.default_rng(seed)
    rows = () if documents is None else (documents,)
    sizes = {"x": (b, t, e), "weight": (e, w), "bias": (e,), "initial_state": (b, *rows, w - 1, e)}
    return {name: rng.standard_normal(size).astype(dtype) for name, size in sizes.items()}


@functools.partial(jax.jit, static_argnames=("activation", "num_documents", "implementation"))
def convolve(arrays, seq_idx=None, *, activation="silu", num_documents=None, implementation="xla"):
    return causal_conv1d(
        **arrays,
        seq_idx=seq_idx,
        activation=activation,
        num_documents=num_documents,
        implementation=implementation,
    )


@functools.partial(jax.jit, static_argnames=("activation", "num_documents", "implementation"))
def values_and_gradients(arrays, seq_idx, cotangents, **options):
    """All outputs and gradients by name; the scalar is the sum of output * cotangent."""
    outputs, transpose = jax.vjp(lambda a: convolve(a, seq_idx, **options), arrays)
    (gradients,) = transpose(
        tuple(c.astype(o.dtype) for c, o in zip(cotangents, outputs, strict=True))
    )
    named = dict(zip(("y", "final_state"), outputs, strict=True))
    return named | {f"d{name}": value for name, value in gradients.items()}


def cotangents(arrays, documents=None):
    (b, t, e), w = arrays["x"].shape, arrays["weight"].shape[1]
    rng = np.random.default_rng(1)
    rows = () if documents is None else (documents,)
    dtype = arrays["x"].dtype
    return [rng.standard_normal(size).astype(dtype) for size in ((b, t, e), (b, *rows, w - 1, e))]


# --- numbers of others --------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "name", [n for n in golden.names("conv1d_") if "update" not in n and "varlen" not in n]
)
def test_golden(name, implementation):
    case = golden.load(name)
    renamed = {"initial_states": "initial_state", "final_states": "final_state"}
    arrays = {renamed.get(k, k): v for k, v in case.inputs.items() if k != "seq_idx"}
    outputs = {renamed.get(k, k): v for k, v in case.outputs.items()}
    b, _, e = arrays["x"].shape
    zero = np.zeros((b, arrays["weight"].shape[1] - 1, e))
    got = values_and_gradients(
        arrays,
        case.inputs.get("seq_idx"),
        [case.cotangents["y"], case.cotangents.get("final_states", zero)],
        activation=case.options.get("activation"),
        implementation=implementation,
    )
    for key, wanted in outputs.items():
        assert_close(key, got[key], wanted, tolerances.GOLDEN_OUT)
    for key, wanted in case.grads.items():
        key = f"d{renamed.get(key, key)}"
        assert_close(key, got[key], wanted, tolerances.GOLDEN_GRAD)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_golden_states_of_packed_documents(implementation):
    """The original's `causal_conv1d_varlen_states` is `num_documents` here."""
    case = golden.load("conv1d_varlen_states")
    x, cu_seqlens = case.inputs["x"], case.inputs["cu_seqlens"]
    arrays = {"x": x[None], "weight": np.zeros((x.shape[1], case.options["state_len"] + 1), "f")}
    seq_idx = seq_idx_from_cu_seqlens(cu_seqlens, x.shape[0])
    _, final = convolve(
        arrays, seq_idx, num_documents=len(cu_seqlens) - 1, implementation=implementation
    )
    assert_close("final_state", final[0], case.outputs["states"], 0)


def original_fill(length=11):
    """Inputs of the specification's section 18, filled channels first."""
    return {
        "x": fill((2, 8, length), 1).transpose(0, 2, 1),
        "weight": fill((8, 4), 2),
        "bias": fill((8,), 3),
    }


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_G1(implementation):
    initial_state = fill((2, 8, 3), 4).transpose(0, 2, 1)
    arrays = original_fill() | {"initial_state": initial_state}
    y = np.asarray(convolve(arrays, implementation=implementation)[0]).transpose(0, 2, 1).ravel()
    wanted = [11.764603, 50.508763, 0.1067145, 0.3568628, -0.2467611]
    got = [y.sum(), np.abs(y).sum(), y[0], y[y.size // 2], y[-1]]
    np.testing.assert_allclose(got, wanted, rtol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_G1b_padded_tail(implementation):
    seq_idx = jnp.array([[0] * 4 + [1] * 3 + [-1] * 4, [0] * 11])
    y, _ = convolve(original_fill(), seq_idx, implementation=implementation)
    assert not np.any(y[0, 7:])
    y = np.asarray(y).transpose(0, 2, 1).ravel()
    wanted = [4.198643, 35.649089, 0.1328527, 0.5713979, -0.2467611]
    got = [y.sum(), np.abs(y).sum(), y[0], y[y.size // 2], y[-1]]
    np.testing.assert_allclose(got, wanted, rtol=1e-5)


T13 = {
    63: 152.235681,
    64: 157.82468,
    65: 156.411091,
    127: 321.582081,
    128: 327.253583,
    129: 328.943408,
    256: 647.048603,
    257: 646.422596,
}


@pytest.mark.parametrize("length", T13)
def test_T13_thirds(length):
    """One document index for each third, in rows filled up with padding to one length."""
    arrays = {
        "x": np.full((1, 257, 8), np.nan, np.float32),
        "weight": fill((8, 4), 2),
        "bias": fill((8,), 3),
    }
    arrays["x"][:, :length] = fill((1, 8, length), 1).transpose(0, 2, 1)
    seq_idx = np.full((1, 257), -1)
    seq_idx[:, :length] = 3 * np.arange(length) // length
    y, _ = convolve(arrays, seq_idx)
    np.testing.assert_allclose(np.abs(y).sum(), T13[length], rtol=1e-5)


# --- one definition -----------------------------------------------------------------------------

PACKED = [[0, 0, 0, 4, 4, 1, 1, 1, 1], [2, 3, 3, 3, 3, 3, 3, 3, 0]]
PADDED = [[-1, 7, -1, 7, 2, 2, -1, -3, 2], [-1] * 9]
SORTED = [[0, 0, -1, 0, 2, 2, 2, -1, 2], [1, 1, 1, 1, 2, -1, -1, -1, -1]]


CASES = {
    "plain": {},
    "bare": {"leave_out": ("initial_state", "bias"), "activation": None},
    "shorter than the taps": {"t": 2},
    "one tap": {"w": 1},
    "packed and padded": {"w": 3, "seq_idx": PACKED + PADDED},
    "packed, many taps": {"w": 7, "seq_idx": PACKED, "leave_out": ("initial_state", "bias")},
    "padded, one tap": {"w": 1, "seq_idx": PADDED, "activation": None},
    "a state per document": {"seq_idx": SORTED, "documents": 4},
}


@pytest.mark.parametrize("case", CASES)
def test_xla_equals_the_definition_in_float64(case):
    case = CASES[case]
    seq_idx, documents = case.get("seq_idx"), case.get("documents")
    b = 2 if seq_idx is None else len(seq_idx)
    seq_idx = None if seq_idx is None else np.array(seq_idx, np.int32)
    arrays = inputs(b=b, t=case.get("t", 9), w=case.get("w", 4), documents=documents)
    arrays = {k: v for k, v in arrays.items() if k not in case.get("leave_out", ())}
    options = {"activation": case.get("activation", "silu"), "num_documents": documents}
    got = values_and_gradients(arrays, seq_idx, cotangents(arrays, documents), **options)
    with jax.enable_x64(True):
        wide = {name: value.astype(np.float64) for name, value in arrays.items()}
        cot = [c.astype(np.float64) for c in cotangents(arrays, documents)]
        wanted = values_and_gradients(wide, seq_idx, cot, implementation="reference", **options)
    for name, value in wanted.items():
        assert value.dtype == np.float64
        limit = tolerances.FP32_GRAD if name.startswith("d") else tolerances.FP32_OUT
        assert_close(name, got[name], value, limit, norm_error)


def test_float64_stays_float64():
    arrays, seq_idx = inputs(), np.array(PADDED, np.int32)
    with jax.enable_x64(True):
        wide = {name: value.astype(np.float64) for name, value in arrays.items()}
        cot = [c.astype(np.float64) for c in cotangents(arrays)]
        got = values_and_gradients(wide, seq_idx, cot)
        wanted = values_and_gradients(wide, seq_idx, cot, implementation="reference")
    for name, value in wanted.items():
        assert got[name].dtype == np.float64, name
        assert_close(name, got[name], value, 1e-13, norm_error)


@pytest.mark.parametrize("seq_idx", [None, PADDED])
def test_the_sums_made_for_gpus_equal_those_made_for_cpus(seq_idx):
    arrays = inputs()
    seq_idx = None if seq_idx is None else np.array(seq_idx, np.int32)

    def loss(arrays):
        y, _ = causal_conv1d(**arrays, seq_idx=seq_idx, implementation="xla")
        return jnp.sum(y * jnp.cos(y))

    cpu = jax.jit(jax.grad(loss))(arrays)
    with devices.assume(devices.H200):
        gpu = jax.jit(jax.grad(lambda arrays: loss(arrays)))(arrays)
    for name, value in cpu.items():
        assert_close(f"d{name}", gpu[name], value, tolerances.FP32_GRAD)


@pytest.mark.parametrize("seq_idx", [None, PACKED])
def test_bfloat16_is_rounded_once(seq_idx):
    rounded = {name: jnp.asarray(v, jnp.bfloat16) for name, v in inputs().items()}
    seq_idx = None if seq_idx is None else np.array(seq_idx, np.int32)
    cot = [c.astype(jnp.bfloat16).astype(np.float32) for c in cotangents(inputs())]
    got = values_and_gradients(rounded, seq_idx, cot)
    wide = {name: v.astype(jnp.float32) for name, v in rounded.items()}
    wanted = values_and_gradients(wide, seq_idx, cot, implementation="reference")
    for name, value in wanted.items():
        assert got[name].dtype == jnp.bfloat16
        limit = tolerances.BF16_GRAD if name.startswith("d") else tolerances.BF16_OUT
        assert_close(name, got[name], value, limit, norm_error)


# --- properties ---------------------------------------------------------------------------------

ids = st.lists(st.integers(-1, 2), min_size=9, max_size=9)
quick = settings(max_examples=25, deadline=None)


def apart(arrays, row: int, ids: list[int], num_documents=None):
    """Output of each real token and the final state of one row, its documents run one by one."""
    w, e = arrays["weight"].shape[1], arrays["x"].shape[2]
    state = arrays["initial_state"][row]
    y, last = np.zeros_like(arrays["x"][row]), -1
    for t, document in enumerate(ids):
        if document < 0:
            continue
        if last not in (-1, document):
            state = np.zeros((w - 1, e), np.float32)
        window = np.concatenate([state, arrays["x"][row, t][None]])
        pre = arrays["bias"] + np.sum(window * arrays["weight"].T, axis=0)
        y[t], state, last = pre / (1 + np.exp(-pre)), window[1:], document
    return y, state


@quick
@given(rows=st.tuples(ids, ids))
def test_packed_equals_apart_with_padding_anywhere(rows):
    arrays = inputs()
    y, final = convolve(arrays, jnp.array(rows))
    for row in range(2):
        wanted_y, wanted_final = apart(arrays, row, rows[row])
        np.testing.assert_allclose(y[row], wanted_y, atol=2e-6)
        np.testing.assert_allclose(final[row], wanted_final, atol=0)


@quick
@given(rows=st.tuples(ids, ids), k=st.sampled_from([1, 4, 8]))
def test_split_equals_whole(rows, k):
    """Cut anywhere, also inside padding; the second half starts with the document it continues."""
    arrays, seq_idx = inputs(), np.array(rows, np.int32)
    y, final = convolve(arrays, seq_idx)
    first, state = convolve(arrays | {"x": arrays["x"][:, :k]}, seq_idx[:, :k])
    # A second half that begins with another document is the caller's to start from zero.
    for row in range(2):
        before = [i for i in rows[row][:k] if i >= 0]
        after = [i for i in rows[row][k:] if i >= 0]
        if before and after and before[-1] != after[0]:
            state = state.at[row].set(0)
    second, last = convolve(
        arrays | {"x": arrays["x"][:, k:], "initial_state": state}, seq_idx[:, k:]
    )
    np.testing.assert_allclose(jnp.concatenate([first, second], axis=1), y, atol=2e-6)
    for row in range(2):
        if any(i >= 0 for i in rows[row][k:]):
            np.testing.assert_allclose(last[row], final[row], atol=0)


@quick
@given(rows=st.tuples(ids, ids))
def test_no_gradient_crosses_documents_and_none_reaches_padding(rows):
    arrays, seq_idx = inputs(), np.array(rows, np.int32)
    arrays["x"] = np.where(seq_idx[..., None] < 0, np.nan, arrays["x"])
    for token in (2, 5, 8):
        dy = np.zeros_like(arrays["x"])
        dy[:, token] = 1
        got = values_and_gradients(arrays, seq_idx, [dy, 0 * arrays["initial_state"]])
        for row in range(2):
            reached = np.any(np.asarray(got["dx"][row]) != 0, axis=-1)
            documents = np.cumsum(
                [
                    i >= 0 and i != last
                    for i, last in zip(rows[row], carried(rows[row]), strict=True)
                ]
            )
            same = (documents == documents[token]) & (seq_idx[row] >= 0)
            assert not np.any(reached & ~same)
            assert np.any(reached) == (seq_idx[row, token] >= 0)
        for name, value in got.items():
            assert np.all(np.isfinite(value)), name


def carried(row: list[int]) -> list[int]:
    """The last id of at least 0 strictly before each token, or -1."""
    out, last = [], -1
    for i in row:
        out.append(last)
        last = i if i >= 0 else last
    return out


@pytest.mark.parametrize("lengths", [[50, 64, 202, 92, 123], [0, 3, 4], [3, 0, 4], [3, 4, 0]])
def test_T13_documents_of_many_lengths_and_a_padded_tail(lengths):
    total = sum(lengths) + 2
    cu_seqlens = np.cumsum([0, *lengths])
    arrays = inputs(b=1, t=total, documents=len(lengths))
    seq_idx = seq_idx_from_cu_seqlens(cu_seqlens, total)
    y, final = convolve(arrays, seq_idx, num_documents=len(lengths))
    assert not np.any(y[:, -2:])
    for i, length in enumerate(lengths):
        state = arrays["initial_state"][:, i]
        if length == 0:
            np.testing.assert_array_equal(final[:, i], state)
            continue
        x = arrays["x"][:, cu_seqlens[i] : cu_seqlens[i + 1]]
        alone, last = convolve(arrays | {"x": x, "initial_state": state})
        np.testing.assert_allclose(y[:, cu_seqlens[i] : cu_seqlens[i + 1]], alone, atol=2e-6)
        np.testing.assert_array_equal(final[:, i], last)


def test_T13_gradients_of_the_weights_add_over_rows():
    arrays, seq_idx = inputs(), np.array(PACKED, np.int32)
    cot = cotangents(arrays)
    whole = values_and_gradients(arrays, seq_idx, cot)
    rows = [
        values_and_gradients(
            {k: v[r : r + 1] if k in ("x", "initial_state") else v for k, v in arrays.items()},
            seq_idx[r : r + 1],
            [c[r : r + 1] for c in cot],
        )
        for r in range(2)
    ]
    for name in ("dweight", "dbias"):
        assert_close(name, whole[name], rows[0][name] + rows[1][name], tolerances.FP32_GRAD)


def test_T22_later_tokens_change_nothing_before_them():
    arrays = inputs()
    y, _ = convolve(arrays)
    changed = arrays | {"x": arrays["x"].copy()}
    changed["x"][:, 5] += 1
    np.testing.assert_array_equal(convolve(changed)[0][:, :5], y[:, :5])


def test_T22_two_runs_give_the_same_bits():
    arrays, seq_idx = inputs(), np.array(PACKED, np.int32)
    one, two = (values_and_gradients(arrays, seq_idx, cotangents(arrays)) for _ in range(2))
    for name, value in one.items():
        np.testing.assert_array_equal(two[name], value, err_msg=name)


def test_vmap_remat_and_scan():
    arrays, seq_idx = inputs(), jnp.array(PACKED)
    wanted = convolve(arrays, seq_idx)

    def row(x, initial_state, seq_idx):
        one = arrays | {"x": x[None], "initial_state": initial_state[None]}
        return jax.tree.map(lambda v: v[0], convolve(one, seq_idx[None]))

    mapped = jax.vmap(row)(arrays["x"], arrays["initial_state"], seq_idx)
    for got, value in zip(mapped, wanted, strict=True):
        np.testing.assert_allclose(got, value, atol=1e-6)

    def loss(x):
        return jnp.sum(convolve(arrays | {"x": x}, seq_idx)[0] ** 2)

    x = jnp.asarray(arrays["x"])
    gradient = jax.grad(loss)(x)
    np.testing.assert_allclose(jax.grad(jax.remat(loss))(x), gradient, atol=1e-6)
    mapped = jax.vmap(jax.grad(loss))(jnp.stack([x, 2 * x]))
    np.testing.assert_allclose(mapped[0], gradient, atol=1e-5)

    def chunk(state, x):
        y, state = convolve(arrays | {"x": x, "initial_state": state})
        return state, y

    chunks = jnp.moveaxis(x.reshape(2, 3, 3, 5), 1, 0)
    state, y = jax.lax.scan(chunk, jnp.asarray(arrays["initial_state"]), chunks)
    y = jnp.moveaxis(y, 0, 1).reshape(x.shape)
    for got, value in zip((y, state), convolve(arrays), strict=True):
        np.testing.assert_allclose(got, value, atol=2e-6)


def test_the_state_keeps_its_dtype():
    arrays = inputs()
    arrays["x"] = jnp.asarray(arrays["x"], jnp.bfloat16)
    y, final = convolve(arrays)
    assert (y.dtype, final.dtype) == (jnp.bfloat16, jnp.float32)
    del arrays["initial_state"]
    assert convolve(arrays)[1].dtype == jnp.bfloat16


# --- the surface --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", shapes.SHAPES)
def test_named_shapes_trace_forward_and_backward(name):
    b, t, e, w = (shapes.SHAPES[name][axis] for axis in "btew")
    x = jax.ShapeDtypeStruct((b, t, e), jnp.bfloat16)
    weight, bias = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((e, w), (e,)))

    def loss(x, weight, bias):
        return causal_conv1d(x, weight, bias)[0].astype(jnp.float32).sum()

    got = jax.eval_shape(jax.grad(loss, argnums=(0, 1, 2)), x, weight, bias)
    assert [g.shape for g in got] == [(b, t, e), (e, w), (e,)]


def test_explain_names_the_implementation():
    arrays = inputs()
    assert "causal_conv1d" in str(explain(causal_conv1d, **arrays))
    named = explain(causal_conv1d, **arrays, implementation="reference")
    assert named.decisions[0].chosen == "reference"


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": np.zeros((2, 9), "f")}, ValueError, r"x must have shape \(b, t, e\); got \(2, 9\)"),
        ({"x": np.zeros((2, 9, 5), int)}, TypeError, "x must have a real floating dtype; got int"),
        ({"x": [[[1.0]]]}, TypeError, "x must be an array"),
        (
            {"weight": np.zeros((4, 4), "f")},
            ValueError,
            r"weight must have shape \(e, w\) with e=5",
        ),
        ({"bias": np.zeros((4,), "f")}, ValueError, "bias must have shape"),
        ({"seq_idx": np.zeros((2, 9), "f")}, TypeError, "seq_idx must have an integer dtype"),
        ({"seq_idx": np.zeros((2, 8), int)}, ValueError, "seq_idx must have shape"),
        (
            {"initial_state": np.zeros((2, 4, 5), "f")},
            ValueError,
            r"initial_state .* got \(2, 4, 5",
        ),
        ({"initial_state": np.zeros((2, 3, 5), int)}, TypeError, "initial_state must have a real"),
        ({"num_documents": 2}, ValueError, "num_documents needs seq_idx"),
        ({"num_documents": 0}, ValueError, "num_documents must be at least 1; got 0"),
        ({"num_documents": 2.0}, TypeError, "num_documents must be an int or None; got 2.0"),
        (
            {"activation": "relu"},
            ValueError,
            "activation must be None, 'silu' or 'swish'; got 'relu'",
        ),
        ({"implementation": "cuda"}, ValueError, "implementation must be None or one of xla"),
    ],
)
def test_bad_arguments_are_refused(change, error, message):
    with pytest.raises(error, match=f"causal_conv1d: {message}"):
        causal_conv1d(**(inputs() | change))


def test_one_tap_has_an_empty_state():
    arrays = inputs(w=1)
    assert convolve(arrays)[1].shape == (2, 0, 5)
    with pytest.raises(ValueError, match=r"initial_state must have shape \(b, w, e\) with b=2"):
        causal_conv1d(**(arrays | {"initial_state": np.zeros((3, 0, 5), "f")}))
