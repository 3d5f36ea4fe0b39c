# SPDX-License-Identifier: Apache-2.0
"""The GPU kernels of `selective_scan`: refusals, splitting, lowering, races; numbers on a card."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import devices, explain, selective_scan
from pallas_kernels.selective_scan import mosaic, mosaic_layout
from tests.tolerances import BF16_GRAD, BF16_OUT, assert_close, norm_error

PACKED = [0, 0, 1, -1, 1, 2, 5, 5, -1, -1]

# What differs from the plain call: sizes, and options of `case`.
CASES = {
    "plain": {"t": 256},
    "ragged": {"t": 203, "e": 200},
    "one_token": {"t": 1, "e": 6},
    "groups": {"e": 512, "g": 2},
    "small_groups": {"e": 12, "g": 4, "n": 8},
    "few_states": {"n": 4},
    "odd_states": {"n": 5},
    "many_states": {"n": 32},
    "most_states": {"n": 64, "t": 48},
    "no_options": {"drop": ("z", "D", "dt_bias", "initial_state"), "dt_softplus": False},
    "float32": {"dtype": jnp.float32},
    "packed": {"t": 150, "packed": True},
    "split": {"b": 1, "t": 4096, "e": 128},
    "split_packed": {"b": 1, "t": 2000, "packed": True},
    "full_card": {"b": 4, "t": 128, "e": 8192},
}


def case(name: str, **overrides) -> tuple[dict, dict]:
    """(arrays, options) of a case; x, dt, z, B and C are bf16 unless it says otherwise."""
    sizes = {"b": 2, "t": 128, "e": 256, "n": 16, "g": 1}
    options = sizes | CASES[name] | overrides
    b, t, e, n, g = (options[key] for key in sizes)
    rng = np.random.default_rng(3)

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    arrays = {
        "x": normal(b, t, e),
        "dt": normal(b, t, e),
        "A": -np.exp(normal(e, n)),
        "B": normal(b, t, g, n),
        "C": normal(b, t, g, n),
        "D": normal(e),
        "z": normal(b, t, e),
        "dt_bias": normal(e) - 2,
        "initial_state": normal(b, e, n),
    }
    arrays = {k: jnp.asarray(v) for k, v in arrays.items() if k not in options.get("drop", ())}
    for key in {"x", "dt", "z", "B", "C"} & set(arrays):
        arrays[key] = arrays[key].astype(options.get("dtype", jnp.bfloat16))
    softplus = options.get("dt_softplus", True)
    if not softplus:
        arrays["dt"] = abs(arrays["dt"]) * 0.2
    chosen = {"dt_softplus": softplus}
    if options.get("packed"):
        ids = np.repeat(PACKED, -(-t // len(PACKED)))[:t]
        chosen["seq_idx"] = jnp.asarray(np.stack([ids, ids[::-1]])[:b], jnp.int32)
    return arrays, chosen


def cotangents(arrays: dict) -> tuple:
    """Random cotangents of both outputs; that of y exact in bf16."""
    rng = np.random.default_rng(4)
    (b, _, e), n = arrays["x"].shape, arrays["A"].shape[1]
    dy = jnp.asarray(rng.standard_normal(arrays["x"].shape), jnp.bfloat16)
    return dy.astype(arrays["x"].dtype), jnp.asarray(rng.standard_normal((b, e, n)), jnp.float32)


def values_and_gradients(function, arrays: dict) -> dict:
    """Outputs and gradients by name."""
    outputs, transpose = jax.vjp(function, arrays)
    dy, dend = cotangents(arrays)
    (gradients,) = transpose((dy.astype(outputs[0].dtype), dend))
    named = dict(zip(("y", "final_state"), outputs, strict=True))
    return named | {f"d{name}": value for name, value in gradients.items()}


def assert_right(got: dict, arrays: dict, options: dict) -> None:
    """Compares with the float32 definition on the same, rounded, inputs."""
    wide = {name: value.astype(jnp.float32) for name, value in arrays.items()}
    call = functools.partial(selective_scan, implementation="reference", **options)
    wanted = jax.jit(lambda arrays: values_and_gradients(lambda a: call(**a), arrays))(wide)
    for name in wanted:
        tolerance = BF16_OUT if name in ("y", "final_state") else BF16_GRAD
        assert_close(name, got[name], wanted[name], tolerance, norm_error)


def canonical(arrays: dict, options: dict) -> dict:
    """The arguments as `api.py` hands them to an implementation."""
    optional = dict.fromkeys(("D", "z", "dt_bias", "initial_state", "seq_idx", "num_documents"))
    return optional | arrays | options


def interpreted(arrays, options):
    """Everything from the kernels on Pallas' GPU interpreter, which also looks for races."""
    parameters = plgpu.InterpretGPUParams(detect_races=True)

    def call(a):
        return mosaic.run(**canonical(a, options), interpret=parameters)

    return values_and_gradients(call, arrays)


@pytest.mark.slow
def test_definition_is_met_by_the_interpreted_kernels(monkeypatch):
    """Split sequence, padded channels and times, groups, documents: all paths in one call."""
    monkeypatch.setattr(mosaic_layout, "count_segments", lambda programs, tiles: min(tiles, 2))
    arrays, options = case("packed", b=1, t=20, e=3, n=4)
    assert_right(interpreted(arrays, options), arrays, options)


@pytest.mark.parametrize("name", ["plain", "float32", "many_states", "split_packed"])
def test_lowers_for_cuda(name):
    arrays, options = case(name)

    def call(a):
        return mosaic.run(**canonical(a, options))

    def both(a):
        return values_and_gradients(call, a)

    text = jax.jit(both).trace(arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text


@pytest.mark.parametrize(
    ("programs", "tiles", "segments"), [(256, 128, 1), (32, 4096, 16), (24, 128, 22), (1, 1, 1)]
)
def test_splits_the_sequence_where_the_card_would_idle(programs, tiles, segments):
    assert mosaic_layout.count_segments(programs, tiles) == segments


def test_segments_cover_the_sequence():
    for programs in (1, 5, 24, 132, 300):
        for tiles in (1, 2, 7, 64, 129, 4096):
            segments = mosaic_layout.count_segments(programs, tiles)
            length = -(-tiles // segments)
            assert (segments - 1) * length < tiles <= segments * length


def test_refuses_with_a_reason():
    arrays, options = case("plain", t=8, e=8)
    call = functools.partial(mosaic.supports, devices.H200)
    plain = canonical(arrays, options)
    assert call(plain) is None
    assert "Hopper" in mosaic.supports(devices.CPU, plain)
    assert "num_documents" in call(plain | {"num_documents": 2})
    assert "constant" in call(plain | {"B": arrays["A"]})
    assert "complex64" in call(plain | {"A": arrays["A"].astype(jnp.complex64)})
    assert "float16" in call(plain | {"x": arrays["x"].astype(jnp.float16)})


def test_is_preferred_on_hopper():
    arrays, options = case("plain", t=8, e=8)
    assert "mosaic" in str(explain(selective_scan, **arrays, **options, device=devices.H200))


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("implementation", ["mosaic", "triton"])
def test_meets_the_definition_on_the_card(implementation, name):
    if implementation == "triton":
        pytest.importorskip("jax_triton")
    arrays, options = case(name)
    call = functools.partial(selective_scan, implementation=implementation, **options)
    both = jax.jit(lambda a: values_and_gradients(lambda a: call(**a), a))
    # The allocator hands memory out again: fill it with NaN, so that what is not written shows.
    poison = [jnp.full((2**26,), jnp.nan) for _ in range(4)]
    jax.block_until_ready(poison)
    del poison
    got = both(arrays)
    assert_right(got, arrays, options)
    for _ in range(9):
        again = both(arrays)
        for key in got:
            assert np.array_equal(np.asarray(got[key]), np.asarray(again[key])), key
