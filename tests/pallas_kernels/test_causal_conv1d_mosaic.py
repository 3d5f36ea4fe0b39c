# SPDX-License-Identifier: Apache-2.0
"""The GPU kernels of `causal_conv1d`: refusals, lowering, the interpreter; numbers on a card."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import causal_conv1d, devices, explain
from pallas_kernels.causal_conv1d import mosaic, mosaic_kernels
from tests import tolerances
from tests.tolerances import assert_close, norm_error

# What differs from the plain call: sizes, and options of `case`.
CASES = {
    "plain": {},
    "one_tile": {"t": 16},
    "several_stretches": {"t": 400, "e": 768},
    "odd_block": {"e": 384},
    "no_options": {"drop": ("bias", "initial_state"), "activation": None},
    "two_taps": {"w": 2, "t": 144},
    "three_taps": {"w": 3, "t": 144},
    "float32": {"dtype": jnp.float32, "t": 144},
    "full_card": {"b": 4, "t": 2048, "e": 1536, "drop": ("initial_state",)},
}


def case(name: str, **overrides) -> tuple[dict, str | None]:
    """(arrays, activation) of a case; x is bf16 unless it says otherwise."""
    options = {"b": 2, "t": 128, "e": 256, "w": 4} | CASES[name] | overrides
    b, t, e, w = (options[key] for key in "btew")
    rng = np.random.default_rng(5)
    sizes = {"x": (b, t, e), "weight": (e, w), "bias": (e,), "initial_state": (b, w - 1, e)}
    arrays = {
        key: jnp.asarray(rng.standard_normal(size), jnp.float32)
        for key, size in sizes.items()
        if key not in options.get("drop", ())
    }
    arrays["x"] = arrays["x"].astype(options.get("dtype", jnp.bfloat16))
    return arrays, options.get("activation", "silu")


def canonical(arrays: dict, activation: str | None) -> dict:
    """The arguments as `api.py` hands them to an implementation."""
    optional = dict.fromkeys(("bias", "initial_state", "seq_idx", "num_documents"))
    return optional | arrays | {"activation": activation}


def values_and_gradients(function, arrays: dict) -> dict:
    """Outputs and gradients by name, for random cotangents; that of y exact in bf16."""
    rng = np.random.default_rng(6)
    (y, final), transpose = jax.vjp(function, arrays)
    dy = jnp.asarray(rng.standard_normal(y.shape), jnp.bfloat16).astype(y.dtype)
    dfinal = jnp.asarray(rng.standard_normal(final.shape), jnp.bfloat16).astype(final.dtype)
    (gradients,) = transpose((dy, dfinal))
    return {"y": y, "final_state": final} | {f"d{k}": v for k, v in gradients.items()}


def assert_right(got: dict, arrays: dict, activation: str | None) -> None:
    """Compares with the float32 definition on the same, rounded, inputs."""
    wide = {name: value.astype(jnp.float32) for name, value in arrays.items()}
    call = functools.partial(causal_conv1d, activation=activation, implementation="reference")
    wanted = jax.jit(lambda a: values_and_gradients(lambda a: call(**a), a))(wide)
    is_rough = arrays["x"].dtype == jnp.bfloat16
    for name in wanted:
        if name.startswith("d"):
            tolerance = tolerances.BF16_GRAD if is_rough else tolerances.FP32_GRAD
        else:
            tolerance = tolerances.BF16_OUT if is_rough else tolerances.FP32_OUT
        assert_close(name, got[name], wanted[name], tolerance, norm_error)


@pytest.mark.parametrize(
    "sizes",
    [
        {"b": 1, "t": 48, "e": 128, "w": 3},
        {"b": 1, "t": 16, "e": 128, "w": 2, "dtype": jnp.float32, "activation": None},
    ],
    ids=["stretches", "one_tile"],
)
def test_definition_is_met_by_the_interpreted_kernels(monkeypatch, sizes):
    """On Pallas' GPU interpreter, which also looks for races."""
    monkeypatch.setattr(mosaic_kernels, "STRETCH", 32)
    arrays, activation = case("plain", **sizes)
    parameters = plgpu.InterpretGPUParams(detect_races=True)

    def call(a):
        return mosaic.run(**canonical(a, activation), interpret=parameters)

    assert_right(values_and_gradients(call, arrays), arrays, activation)


@pytest.mark.parametrize("name", ["plain", "float32"])
def test_lowers_for_cuda(name):
    arrays, activation = case(name)

    def both(a):
        return values_and_gradients(lambda a: mosaic.run(**canonical(a, activation)), a)

    text = jax.jit(both).trace(arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text


def test_refuses_with_a_reason():
    arrays, activation = case("plain")
    plain = canonical(arrays, activation)
    call = functools.partial(mosaic.supports, devices.H200)
    assert call(plain) is None
    assert "Hopper" in mosaic.supports(devices.CPU, plain)
    assert "seq_idx" in call(plain | {"seq_idx": jnp.zeros((2, 128), jnp.int32)})
    assert "float16" in call(plain | {"x": arrays["x"].astype(jnp.float16)})
    assert "w=5" in call(plain | {"weight": jnp.zeros((256, 5))})
    assert "t=127" in call(plain | {"x": arrays["x"][:, :127]})
    assert "e=200" in call(plain | {"x": arrays["x"][..., :200]})


def test_runs_on_hopper_when_asked_for():
    arrays, activation = case("plain")
    call = functools.partial(explain, causal_conv1d, device=devices.H200, activation=activation)
    assert call(**arrays).decisions[0].chosen == "xla"
    assert call(**arrays, implementation="mosaic").decisions[0].chosen == "mosaic"


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_meets_the_definition_on_the_card(name):
    arrays, activation = case(name)
    call = functools.partial(causal_conv1d, activation=activation, implementation="mosaic")
    both = jax.jit(lambda a: values_and_gradients(lambda a: call(**a), a))
    # The allocator hands memory out again: fill it with NaN, so that what is not written shows.
    poison = [jnp.full((2**26,), jnp.nan) for _ in range(4)]
    jax.block_until_ready(poison)
    del poison
    got = both(arrays)
    assert_right(got, arrays, activation)
    for _ in range(9):
        again = both(arrays)
        for key in got:
            assert np.array_equal(np.asarray(got[key]), np.asarray(again[key])), key
