# SPDX-License-Identifier: Apache-2.0
"""The norms: golden numbers, every gradient, groups, gates, residual stream, refusals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import add_layer_norm, add_rms_norm, devices, explain, layer_norm, rms_norm
from pallas_kernels.normalization import shapes
from tests import golden, tolerances
from tests.golden import fill
from tests.tolerances import assert_close, norm_error

IMPLEMENTATIONS = ["xla", "reference"]
NORMS = {f.__name__: f for f in (rms_norm, layer_norm, add_rms_norm, add_layer_norm)}


@functools.partial(jax.jit, static_argnames=("norm", "options"))
def values_and_gradients(arrays, cotangents, *, norm, options=()):
    """All outputs and gradients by name; the scalar is the sum of output * cotangent."""

    def call(arrays):
        if norm.startswith("add"):
            y, residual = NORMS[norm](**({"residual": None} | arrays), **dict(options))
            return {"y": y, "residual_out": residual}
        return {"y": NORMS[norm](**arrays, **dict(options))}

    outputs, transpose = jax.vjp(call, arrays)
    (gradients,) = transpose(
        {name: cotangents[name].astype(o.dtype) for name, o in outputs.items()}
    )
    return outputs | {f"d{name}": value for name, value in gradients.items()}


def inputs(norm, shape=(2, 3, 8), dtype=np.float32):
    rng = np.random.default_rng(0)
    other = "residual" if norm.startswith("add") else "z"
    sizes = {"x": shape, other: shape, "weight": shape[-1:], "bias": shape[-1:]}
    arrays = {name: rng.standard_normal(size).astype(dtype) for name, size in sizes.items()}
    return arrays, {
        name: rng.standard_normal(shape).astype(dtype) for name in ("y", "residual_out")
    }


def check_golden(name, norm, implementation, **options):
    case = golden.load(name)
    options |= {"eps": case.options["eps"], "implementation": implementation}
    got = values_and_gradients(
        case.inputs, case.cotangents, norm=norm, options=tuple(options.items())
    )
    for key, wanted in case.outputs.items():
        assert_close(key, got[key], wanted, tolerances.GOLDEN_OUT)
    for key, wanted in case.grads.items():
        assert_close(f"d{key}", got[f"d{key}"], wanted, tolerances.GOLDEN_GRAD)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", golden.names("gatednorm_"))
def test_golden_gated(name, implementation):
    settings = golden.load(name).options
    options = {k: settings[k] for k in ("group_size", "norm_before_gate") if k in settings}
    check_golden(name, "rms_norm", implementation, **options)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", golden.names("addnorm_"))
def test_golden_added(name, implementation):
    norm = "add_rms_norm" if golden.load(name).options["rms"] else "add_layer_norm"
    check_golden(name, norm, implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("before_gate", "wanted"),
    [
        (True, [-1.236551, 2.624069, -0.0011314, 0.0306959, 0.0237676]),
        (False, [-2.153232, 7.448674, -0.0036388, 0.1791932, 0.0519749]),
    ],
)
def test_G4(before_gate, wanted, implementation):
    x, z, weight = fill((3, 8), 1), fill((3, 8), 2), fill((8,), 3)
    options = {"group_size": 4, "norm_before_gate": before_gate, "implementation": implementation}
    y = np.asarray(rms_norm(x, weight, z=z, **options)).ravel()
    got = [y.sum(), np.abs(y).sum(), y[0], y[y.size // 2], y[-1]]
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-6)


T8 = {
    (True, 4): "-1.236551/2.624069 -.473953/1.636262 -.655035/2.271978 .830981/1.442608",
    (True, 8): "-1.208267/2.345527 .095596/2.527433 -.742625/2.178453 1.093011/1.608876",
    (False, 4): "-2.153232/7.448674 -3.510756/5.433342 -.04095/2.437317 .904534/3.462586",
    (False, 8): "-2.374841/6.35885 -1.832416/6.724099 -.703824/3.856088 2.082161/3.889014",
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("before_gate", "group_size"), T8)
def test_T8_groups_and_gate_in_both_directions(before_gate, group_size, implementation):
    arrays = {"x": fill((3, 8), 1), "z": fill((3, 8), 2), "weight": fill((8,), 3)}
    options = {
        "group_size": group_size,
        "norm_before_gate": before_gate,
        "implementation": implementation,
    }
    got = values_and_gradients(
        arrays, {"y": fill((3, 8), 4)}, norm="rms_norm", options=tuple(options.items())
    )
    wanted = T8[before_gate, group_size].split()
    for name, pair in zip(("y", "dx", "dz", "dweight"), wanted, strict=True):
        sums = [np.sum(got[name]), np.sum(np.abs(got[name]))]
        np.testing.assert_allclose(
            sums, [float(v) for v in pair.split("/")], atol=2e-5, err_msg=name
        )


CASES = [
    ("rms_norm", {}, ()),
    ("rms_norm", {"group_size": 2, "norm_before_gate": False}, ("bias",)),
    ("layer_norm", {"group_size": 4}, ()),
    ("layer_norm", {"norm_before_gate": False, "eps": 0.1}, ()),
    ("layer_norm", {}, ("z", "bias")),
    ("add_rms_norm", {}, ("bias",)),
    ("add_rms_norm", {}, ("residual",)),
    ("add_layer_norm", {"eps": 0.1}, ()),
]


@pytest.mark.parametrize(("norm", "options", "leave_out"), CASES)
def test_xla_equals_the_definition_in_float64(norm, options, leave_out):
    arrays, cot = inputs(norm)
    arrays = {name: value for name, value in arrays.items() if name not in leave_out}
    got = values_and_gradients(arrays, cot, norm=norm, options=tuple(options.items()))
    with jax.enable_x64(True):
        wide = {name: value.astype(np.float64) for name, value in arrays.items()}
        if norm.startswith("add"):
            options = options | {"residual_dtype": "float64"}
        exact = values_and_gradients(wide, cot, norm=norm, options=tuple(options.items()))
        options = tuple((options | {"implementation": "reference"}).items())
        wanted = values_and_gradients(wide, cot, norm=norm, options=options)
    for name, value in wanted.items():
        limit = tolerances.FP32_GRAD if name.startswith("d") else tolerances.FP32_OUT
        assert_close(name, got[name], value, limit, norm_error)
        assert exact[name].dtype == np.float64
        assert_close(f"{name} in float64", exact[name], value, 1e-13, norm_error)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("residual_dtype", ["float32", "bfloat16"])
def test_bfloat16_is_rounded_once(norm, residual_dtype):
    """And add_* normalise the sum before it is rounded to the dtype of the residual stream."""
    arrays, cot = inputs(norm, shape=(2, 5, 16))
    arrays = {name: jnp.asarray(value, jnp.bfloat16) for name, value in arrays.items()}
    cot = {name: jnp.asarray(value, jnp.bfloat16).astype("float32") for name, value in cot.items()}
    options = (("residual_dtype", residual_dtype),) if norm.startswith("add") else ()
    got = values_and_gradients(arrays, cot, norm=norm, options=options)
    wide = {name: value.astype(jnp.float32) for name, value in arrays.items()}
    wanted = values_and_gradients(wide, cot, norm=norm, options=(("implementation", "reference"),))
    for name, value in wanted.items():
        dtype = residual_dtype if name == "residual_out" else "bfloat16"
        assert got[name].dtype == dtype, name
        np.testing.assert_array_equal(
            np.asarray(got[name], np.float32) if not name.startswith("d") else 0,
            np.asarray(value.astype(dtype), np.float32) if not name.startswith("d") else 0,
            err_msg=name,
        )
        limit = tolerances.BF16_GRAD if name.startswith("d") else tolerances.BF16_OUT
        assert_close(name, got[name], value, limit, norm_error)


def test_the_normed_sum_is_the_unrounded_one():
    """256 + 1 rounds to 256 in bfloat16; the norm still sees 257 beside 256."""
    x = jnp.array([[1.0, 0.0]], jnp.bfloat16)
    residual = jnp.array([[256.0, 256.0]], jnp.bfloat16)
    weight = jnp.ones(2, jnp.float32)
    y, total = add_layer_norm(x, residual, weight, residual_dtype=jnp.bfloat16)
    assert total.tolist() == [[256, 256]]
    np.testing.assert_allclose(np.asarray(y, np.float32), [[1, -1]], atol=1e-2)


@pytest.mark.parametrize("norm", ["rms_norm", "add_layer_norm"])
def test_the_sums_made_for_gpus_equal_those_made_for_cpus(norm):
    arrays, cot = inputs(norm)
    cpu = values_and_gradients(arrays, cot, norm=norm)
    with devices.assume(devices.H200):
        gpu = jax.jit(functools.partial(values_and_gradients.__wrapped__, norm=norm))(arrays, cot)
    for name, value in cpu.items():
        assert_close(name, gpu[name], value, tolerances.FP32_GRAD)


@pytest.mark.parametrize("shape", [(8,), (3, 8), (2, 1, 3, 8)])
def test_any_number_of_axes(shape):
    arrays, cot = inputs("rms_norm", shape)
    got = values_and_gradients(arrays, cot, norm="rms_norm")
    wanted = values_and_gradients(
        arrays, cot, norm="rms_norm", options=(("implementation", "reference"),)
    )
    for name, value in wanted.items():
        assert_close(name, got[name], value, tolerances.GOLDEN_GRAD)


def test_extreme_rows_stay_finite():
    """A row of zeros has the gradient weight / sqrt(eps); large values do not overflow."""
    x = np.array([[0, 0], [1e18, -1e18], [1e-20, 0]], np.float32)
    got = values_and_gradients(
        {"x": x, "weight": np.ones(2, "f")}, {"y": np.ones((3, 2), "f")}, norm="rms_norm"
    )
    for name, value in got.items():
        assert np.all(np.isfinite(value)), name
    np.testing.assert_allclose(got["dx"][0], 1e-5**-0.5, rtol=1e-5)


def test_vmap_remat_scan_and_repeatability():
    arrays, cot = inputs("add_rms_norm")
    x, residual, weight = (jnp.asarray(arrays[name]) for name in ("x", "residual", "weight"))
    y, total = add_rms_norm(x, residual, weight)
    mapped = jax.vmap(jax.vmap(add_rms_norm, (0, 0, None)), (0, 0, None))(x, residual, weight)
    np.testing.assert_allclose(mapped[0], y, atol=1e-6)

    def loss(x, weight):
        y, total = add_rms_norm(x, residual, weight)
        return jnp.sum(y * cot["y"]) + jnp.sum(total * cot["residual_out"])

    plain = jax.grad(loss, (0, 1))(x, weight)
    for other in (jax.grad(jax.remat(loss), (0, 1)), jax.jit(jax.grad(loss, (0, 1)))):
        for got, wanted in zip(other(x, weight), plain, strict=True):
            np.testing.assert_allclose(got, wanted, atol=1e-6)
    for got, wanted in zip(jax.grad(loss, (0, 1))(x, weight), plain, strict=True):
        np.testing.assert_array_equal(got, wanted)

    def layer(stream, weight):
        y, stream = add_rms_norm(jnp.tanh(stream), stream, weight)
        return stream, y

    stream, _ = jax.lax.scan(layer, total, jnp.stack([weight, weight]))
    np.testing.assert_allclose(stream, layer(layer(total, weight)[0], weight)[0], atol=1e-6)


@pytest.mark.parametrize("name", shapes.GATED)
def test_named_gated_shapes_trace(name):
    size = shapes.GATED[name]
    x = jax.ShapeDtypeStruct((size["b"], size["t"], size["f"]), jnp.bfloat16)
    weight = jax.ShapeDtypeStruct((size["f"],), jnp.float32)
    norm = functools.partial(rms_norm, group_size=size["group_size"])
    assert jax.eval_shape(lambda x, weight: norm(x, weight, z=x), x, weight) == x


@pytest.mark.parametrize("name", shapes.ADDED)
def test_named_added_shapes_trace(name):
    size = shapes.ADDED[name]
    x = jax.ShapeDtypeStruct((size["b"], size["t"], size["f"]), jnp.bfloat16)
    weight = jax.ShapeDtypeStruct((size["f"],), jnp.float32)
    y, residual = jax.eval_shape(add_rms_norm, x, None, weight)
    assert (y.dtype, residual.dtype) == (jnp.bfloat16, jnp.float32)


@pytest.mark.parametrize("norm", NORMS)
def test_explain_names_the_norm(norm):
    arrays, _ = inputs(norm)
    x, *rest = (arrays.pop(name) for name in (["x", "residual"] if "add" in norm else ["x"]))
    decisions = explain(
        NORMS[norm], x, *rest, arrays["weight"], implementation="reference"
    ).decisions
    assert [(d.operation, d.chosen) for d in decisions] == [(norm, "reference")]


X, W = np.zeros((2, 3, 8), "f"), np.zeros(8, "f")


@pytest.mark.parametrize(
    ("norm", "change", "error", "message"),
    [
        ("rms_norm", {"x": np.zeros((), "f")}, ValueError, r"x must have shape \(..., f\)"),
        ("rms_norm", {"x": X.astype(int)}, TypeError, "x must have a real floating dtype; got int"),
        ("layer_norm", {"x": [1.0]}, TypeError, "x must be an array"),
        ("rms_norm", {"weight": W[:7]}, ValueError, "weight must have shape .* f=8"),
        ("layer_norm", {"bias": X}, ValueError, r"bias must have shape \(f\); got \(2, 3, 8\)"),
        ("rms_norm", {"z": X[:1]}, ValueError, "z must have shape"),
        ("rms_norm", {"group_size": 3}, ValueError, "group_size must divide f=8; got 3"),
        ("rms_norm", {"group_size": 0}, ValueError, "group_size must be at least 1; got 0"),
        ("rms_norm", {"group_size": 2.0}, TypeError, "group_size must be an int or None; got 2.0"),
        ("layer_norm", {"eps": -1.0}, ValueError, "eps must be at least 0; got -1.0"),
        (
            "rms_norm",
            {"implementation": "mosaic"},
            ValueError,
            "implementation must be None or one",
        ),
        ("add_rms_norm", {"residual": X[:, :2]}, ValueError, "residual must have shape"),
        ("add_layer_norm", {"residual_dtype": "int32"}, TypeError, "residual_dtype must be a real"),
    ],
)
def test_bad_arguments_are_refused(norm, change, error, message):
    arguments = {"x": X, "weight": W} | ({"residual": None} if "add" in norm else {}) | change
    with pytest.raises(error, match=f"{norm}: {message}"):
        NORMS[norm](**arguments)
