# SPDX-License-Identifier: Apache-2.0
"""The Hopper kernels of `ssd`: what they refuse, lowering, races, and on a GPU every number."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import devices, explain, ssd
from pallas_kernels.ssd import (
    mosaic,
    mosaic_config,
    mosaic_forward,
    mosaic_rows,
    mosaic_sums,
    reference,
)
from tests.pallas_kernels.ssd_inputs import assert_same, outputs_and_gradients, random
from tests.tolerances import BF16_GRAD, BF16_OUT

BF16_NAMES = ("x", "B", "C", "z")
INTERPRETER = plgpu.InterpretGPUParams()
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


QUICK = ("small_state",)


def thorough(names):
    """The cases as parameters; all but the quick ones run only in the long test run."""
    return [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in names]


@pytest.mark.parametrize("name", thorough(CASES))
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


SIMULATED = {
    # Chunks enough that every slot of shared memory is used twice.
    "two_heads": ({"t": 192, "h": 2, "D": None}, {}, mosaic_forward.Config()),
    "one_head": (
        {"t": 150, "h": 1, "n": 48, "p": 32, "z": True},
        {"seq_idx": True},
        mosaic_forward.Config(heads=1, producer=False),
    ),
    "segments": (
        {"t": 256, "h": 2, "g": 2, "D": None},
        {},
        mosaic_forward.Config(heads=1, producer=False, together=False, segments=2),
    ),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) for n in SIMULATED])
def test_simulated_without_races(name, monkeypatch):
    sizes, options, layout = SIMULATED[name]
    sizes = {"b": 1, "p": 64, "g": 1, "n": 64, "z": False, "D": "h"} | sizes
    arrays = {k: jnp.asarray(v) for k, v in random(5, **sizes).items()}
    for key in BF16_NAMES:
        if key in arrays:
            arrays[key] = (0.5 * arrays[key]).astype(jnp.bfloat16)
    packed = np.resize(PACKED, sizes["t"])[None] if options else None
    monkeypatch.setattr(mosaic_config, "choose_forward", lambda *a, **k: layout)
    simulator = plgpu.InterpretGPUParams(detect_races=True)

    def loss(run, arrays):
        given = {"D": None, "z": None, **arrays}
        y, state = run(
            **given,
            dt_softplus=True,
            dt_limit=(0.0, math.inf),
            seq_idx=packed,
            num_documents=None,
            chunk_size=None,
        )
        total = jnp.sum(y * weights["y"]) + jnp.sum(state * weights["final_state"])
        return total, {"y": y, "final_state": state}

    weights = cotangents(arrays)
    results = {}
    for key, run, inputs in (
        ("got", functools.partial(mosaic.run, static=mosaic.Static(simulator)), arrays),
        ("wanted", reference.run, widened(arrays)),
    ):
        both = jax.value_and_grad(functools.partial(loss, run), has_aux=True)
        (_, outputs), gradients = both(inputs)
        results[key] = outputs, gradients
    assert_same(results["got"], results["wanted"], BF16_OUT, BF16_GRAD)
    assert not interpret_pallas_call.get_races().races_found


@pytest.mark.parametrize("count", [3, 90])
def test_rows_of_decays(count):
    r = np.random.default_rng(0)
    step = r.uniform(size=(1, 1, count, 64)).astype(np.float32)
    decay = -3 * r.uniform(size=step.shape).astype(np.float32)
    decay[0, 0, 0, 5] = mosaic_rows.FORGETS
    p = np.cumsum(decay.astype(np.float64), axis=-1)
    w = np.exp2(p[..., -1:] - p)
    run = functools.partial(mosaic_sums.decay_rows, step, decay, interpret=INTERPRETER)
    wanted = np.stack([p, p - np.log2(step), np.exp2(p), step * w], axis=3)
    np.testing.assert_allclose(run(for_backward=False), wanted, rtol=1e-4, atol=1e-4)
    wanted = np.stack([p, step, np.exp2(p), w], axis=3)
    np.testing.assert_allclose(run(for_backward=True), wanted, rtol=1e-4, atol=1e-4)


def test_sums_of_pairs():
    r = np.random.default_rng(1)
    later, leaving = r.normal(size=(2, 1, 2, 40, 64)).astype(np.float32)
    wanted = later @ np.tri(64) + leaving @ (1 - np.tri(64))
    got = mosaic_sums.pair_sums(later, leaving, interpret=INTERPRETER)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "b, chunks, h, g", [(8, 32, 64, 1), (4, 64, 80, 1), (1, 1024, 64, 1), (1, 7, 3, 3)]
)
def test_layouts_cover_the_work(b, chunks, h, g):
    forward = mosaic_config.choose_forward(b, chunks, h, g)
    assert chunks % forward.segments == 0
    assert (h // g) % mosaic_config.choose_backward(b, chunks, h, g).splits == 0
