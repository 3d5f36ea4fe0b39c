# SPDX-License-Identifier: Apache-2.0
"""The Hopper kernels of `ssd`: what they refuse, lowering, races, and on a GPU every number."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import devices, explain, ssd
from tests.pallas_kernels.ssd_inputs import assert_same, outputs_and_gradients, random
from tests.tolerances import BF16_GRAD, BF16_OUT

BF16_NAMES = ("x", "B", "C", "z")
PACKED = [0, 0, 1, -1, 1, 2, 5, 5, -1, -1]

# What differs from the plain call: sizes, and options of `random` and `ssd`.
CASES = {
    "plain": {"t": 256},
    "ragged": {"t": 200, "h": 3, "g": 1},
    "short": {"t": 5},
    "small_head": {"p": 32, "n": 48, "D": "hp"},
    "large_head": {"p": 128, "D": "hp"},
    "small_state": {"n": 16},
    "gate": {"z": True, "g": 1},
    "no_skip": {"D": None},
    "limits": {"dt_limit": (0.02, 0.3)},
    "raw_steps": {"dt_softplus": False},
    "packed": {"t": 150, "z": True, "seq_idx": True},
    "long": {"b": 1, "t": 4096, "h": 2, "g": 1},
    "many_heads": {"b": 2, "t": 512, "h": 24, "g": 1},
}


def case(name: str) -> tuple[dict, dict]:
    """(arrays, options) of a case; x, B, C and z are bf16."""
    sizes = {"b": 2, "t": 128, "h": 4, "p": 64, "g": 2, "n": 128, "z": False, "D": "h"}
    options = {key: v for key, v in CASES[name].items() if key not in sizes}
    arrays = random(3, **sizes | {key: v for key, v in CASES[name].items() if key in sizes})
    for key in BF16_NAMES:
        if key in arrays:
            arrays[key] = jnp.asarray(0.5 * arrays[key], jnp.bfloat16)
    if options.pop("seq_idx", False):
        b, t = arrays["dt"].shape[:2]
        ids = np.repeat(PACKED, math.ceil(t / len(PACKED)))[:t]
        options["seq_idx"] = jnp.asarray(np.stack([ids, ids[::-1]])[:b], jnp.int32)
    return {key: jnp.asarray(value) for key, value in arrays.items()}, options


def cotangents(arrays: dict) -> dict:
    """Random cotangents; that of y exact in bf16."""
    r = np.random.default_rng(4)
    (b, _, h, p), n = arrays["x"].shape, arrays["B"].shape[3]
    y = jnp.asarray(r.normal(size=arrays["x"].shape), jnp.bfloat16).astype(jnp.float32)
    return {"y": y, "final_state": jnp.asarray(r.normal(size=(b, h, p, n)), jnp.float32)}


def widened(arrays: dict) -> dict:
    return {key: value.astype(jnp.float32) for key, value in arrays.items()}


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_matches_fp32_on_the_same_inputs(name):
    arrays, options = case(name)
    weights = cotangents(arrays)
    got = outputs_and_gradients(arrays, weights, implementation="mosaic", **options)
    wanted = outputs_and_gradients(widened(arrays), weights, implementation="xla", **options)
    assert_same(got, wanted, BF16_OUT, BF16_GRAD)


@pytest.mark.gpu
def test_ten_runs_are_bit_identical():
    arrays, options = case("many_heads")
    weights = cotangents(arrays)
    run = functools.partial(outputs_and_gradients, implementation="mosaic", **options)
    first = jax.device_get(run(arrays, weights))
    for _ in range(9):
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(run(arrays, weights)), first)


@pytest.mark.gpu
def test_every_output_is_written_over_poisoned_memory():
    arrays, options = case("ragged")
    weights = cotangents(arrays)
    wanted = outputs_and_gradients(arrays, weights, implementation="mosaic", **options)
    poison = [jnp.full((2**i,), jnp.nan) for i in range(8, 26)]
    jax.block_until_ready(poison)
    del poison
    got = outputs_and_gradients(arrays, weights, implementation="mosaic", **options)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(got), jax.device_get(wanted))
    assert all(bool(jnp.isfinite(leaf.astype(jnp.float32)).all()) for leaf in jax.tree.leaves(got))


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"x": jnp.float32, "B": jnp.float32, "C": jnp.float32}, "must be bfloat16"),
        ({"num_documents": 6}, "num_documents"),
        ({"p": 48}, "headdim"),
        ({"n": 24}, "d_state"),
    ],
)
def test_refuses_with_a_reason(changes, reason):
    sizes = {"b": 1, "t": 4, "h": 2, "p": 64, "g": 1, "n": 16, "z": False}
    sizes |= {key: value for key, value in changes.items() if key in sizes}
    arrays = random(0, **sizes) | {}
    arrays.pop("initial_state")
    for key in ("x", "B", "C"):
        arrays[key] = jnp.asarray(arrays[key], changes.get(key, jnp.bfloat16))
    options = {"num_documents": changes.get("num_documents"), "seq_idx": jnp.zeros((1, 4), int)}
    with devices.assume(devices.H200), pytest.raises(NotImplementedError, match=reason):
        ssd(**arrays, **options, implementation="mosaic")
    decision = explain(ssd, device=devices.H200, **arrays, **options).decisions[0]
    assert decision.chosen == "xla" and reason in decision.refused["mosaic"]


def test_refuses_other_devices():
    arrays, _ = case("plain")
    with devices.assume(devices.CPU), pytest.raises(NotImplementedError, match="Hopper"):
        ssd(**arrays, implementation="mosaic")


def test_is_the_default_on_hopper():
    arrays, _ = case("plain")
    assert explain(ssd, device=devices.H200, **arrays).decisions[0].chosen == "mosaic"


@pytest.mark.parametrize("name", CASES)
def test_lowers_for_cuda(name):
    arrays, options = case(name)

    def run(arrays):
        with devices.assume(devices.H200):
            return ssd(**arrays, **{"dt_softplus": True, **options}, implementation="mosaic")

    def both(arrays):
        out, pullback = jax.vjp(run, arrays)
        return out, pullback(out)

    text = jax.jit(both).trace(arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") >= 4
