# SPDX-License-Identifier: Apache-2.0
"""Each mixer against float64 values of the original: outputs, steps, states, every gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mamba_jax import Mamba, Mamba2, Mamba3
from mamba_jax.cache import Mamba1Cache, Mamba2Cache
from mamba_jax.checkpoint.packing import FileTensor, module_tensors
from mamba_jax.config import AttentionConfig
from mamba_jax.layers.attention import MHA
from tests import golden
from tests.tolerances import GOLDEN_GRAD, GOLDEN_OUT, assert_close

KINDS = {"block_mamba1": Mamba, "block_mamba2": Mamba2, "block_mamba3": Mamba3}
CASES = golden.names("block_")


@jax.jit
def call(mixer, u, seq_idx=None, cache=None):
    return mixer(u, seq_idx=seq_idx, cache=cache)


def build(case: golden.Case) -> nnx.Module:
    """The mixer of a golden case, its parameters read from the original's packed layout."""
    options = {k: v for k, v in case.options.items() if k not in ("module", "prefill_len")}
    options = options.get("kwargs", options)
    kind = next(kind for prefix, kind in KINDS.items() if case.name.startswith(prefix))
    mixer = kind(rngs=nnx.Rngs(0), **options)
    stored = {
        name.removeprefix("param."): value
        for name, value in case.inputs.items()
        if name.startswith("param.")
    }
    load(mixer, stored)
    return mixer


def load(mixer: nnx.Module, stored: dict[str, np.ndarray]) -> None:
    tensors = packed(mixer)
    assert {tensor.name for tensor in tensors} == set(stored)
    for tensor in tensors:
        for piece in tensor.pieces:
            parameter(mixer, piece.path)[...] = jnp.asarray(piece.from_file(stored[tensor.name]))


def packed(mixer: nnx.Module) -> list[FileTensor]:
    return [
        FileTensor(tensor.name.removeprefix("."), tensor.shape, tensor.dtype, tensor.pieces)
        for tensor in module_tensors(mixer, (), "", None)
    ]


def parameter(module, path):
    for key in path:
        module = getattr(module, key)
    return module


def original_layout(cache) -> dict[str, np.ndarray]:
    """Our states in the original's names and layout (its convolution keeps one row more)."""
    match cache:
        case Mamba1Cache():
            return {"conv": cache.conv, "ssm": cache.ssm}
        case Mamba2Cache():
            conv = jnp.concatenate([cache.conv[name] for name in ("x", "B", "C")], axis=-1)
            return {"conv": conv, "ssm": cache.ssm}
    return {"angle": cache.angle, "ssm": cache.ssm, "k": cache.B, "v": cache.x}


def assert_states(cache, case: golden.Case, prefix: str):
    compared = 0
    for name, got in original_layout(cache).items():
        key = f"{prefix}.{name}"
        if key not in case.outputs:
            continue
        wanted = case.outputs[key]
        if name == "conv":
            wanted = wanted[:, 1:]
        if name == "angle":
            turns = np.asarray(got, np.float64) - wanted
            got, wanted = np.exp(1j * turns), np.ones_like(turns)
        assert_close(key, got, wanted, GOLDEN_OUT)
        compared += 1
    assert compared >= 2


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_every_gradient(name):
    case = golden.load(name)
    mixer = build(case)

    @jax.jit
    def run(mixer, u):
        def loss(mixer, u):
            y = mixer(u)
            return jnp.sum(y * jnp.asarray(case.cotangents["y"], jnp.float32)), y

        return jax.grad(loss, argnums=(0, 1), has_aux=True)(mixer, u)

    (grads, du), y = run(mixer, jnp.asarray(case.inputs["u"]))
    assert_close("y", y, case.outputs["y"], GOLDEN_OUT)
    assert_close("du", du, case.grads["u"], GOLDEN_GRAD)
    for tensor in packed(mixer):
        got = tensor.assemble(lambda path, layer: np.asarray(parameter(grads, path)[...]))
        assert_close(f"d {tensor.name}", got, case.grads[f"param.{tensor.name}"], GOLDEN_GRAD)


@pytest.mark.parametrize("name", CASES)
def test_steps_and_states(name):
    """Prefill then steps, and steps alone, end in the sequence's outputs and the original's states.

    Also where the original cannot step at all (D per channel)."""
    case = golden.load(name)
    mixer = build(case)
    u = jnp.asarray(case.inputs["u"])
    wanted = case.outputs.get("y_step", case.outputs["y"])
    step = jax.jit(lambda mixer, u, cache: mixer.step(u, cache))

    def steps(cache, start):
        outputs = []
        for t in range(start, u.shape[1]):
            y, cache = step(mixer, u[:, t], cache)
            outputs.append(y)
        return jnp.stack(outputs, axis=1), cache

    y, cache = steps(mixer.init_cache(u.shape[0]), 0)
    assert_close("y by steps", y, wanted, GOLDEN_OUT)
    if any(key.startswith("state_final") for key in case.outputs):
        assert_states(cache, case, "state_final")
    prefill = int(case.options.get("prefill_len", 5))
    first, cache = call(mixer, u[:, :prefill], cache=mixer.init_cache(u.shape[0]))
    if any(key.startswith("state_after_prefill") for key in case.outputs):
        assert_states(cache, case, "state_after_prefill")
    rest, _ = steps(cache, prefill)
    assert_close("y", jnp.concatenate([first, rest], axis=1), wanted, GOLDEN_OUT)


# Specification section 18: id → (module, options, sum, sum of |.|, first, middle, last).
GOLDEN_NUMBERS = {
    "G6": (
        Mamba,
        {"d_model": 8, "d_state": 4},
        0.141293,
        1.215993,
        0.0018048,
        0.0012768,
        -0.011627,
    ),
    "G7": (
        Mamba2,
        {"d_model": 16, "d_state": 6, "headdim": 4, "d_ssm": 24, "ngroups": 2},
        *(-13.358615, 82.568689, -0.2189454, 0.7591536, -0.0117220),
    ),
    "G7b": (
        Mamba2,
        {
            **{"d_model": 16, "d_state": 6, "headdim": 4, "ngroups": 2, "rmsnorm": False},
            **{"D_has_hdim": True, "dt_limit": (0.3, 0.8)},
        },
        *(0.730249, 7.960443, -0.0021257, -0.0964388, -0.0342667),
    ),
    "G8a": (
        Mamba3,
        {"d_model": 16, "d_state": 8, "headdim": 4, "ngroups": 2},
        *(-1.215216, 18.693263, 0.0176723, -0.1514607, -0.1028885),
    ),
    "G8b": (
        Mamba3,
        {
            **{"d_model": 16, "d_state": 8, "headdim": 4, "rope_fraction": 1.0},
            "is_outproj_norm": True,
        },
        *(1.123710, 23.980802, 0.2991490, 0.0805778, 0.0414227),
    ),
    "G8c": (
        Mamba3,
        {
            **{"d_model": 16, "d_state": 8, "headdim": 4, "ngroups": 2},
            **{"is_mimo": True, "mimo_rank": 2},
        },
        *(0.015115, 1.209974, -0.0008253, -0.0025241, -0.0085062),
    ),
    "G8d": (
        Mamba3,
        {
            **{"d_model": 16, "d_state": 8, "headdim": 4, "rope_fraction": 1.0},
            **{"is_mimo": True, "mimo_rank": 2, "is_outproj_norm": True},
        },
        *(0.078682, 2.158193, 0.0109131, -0.0140472, -0.0177037),
    ),
    "G8e": (
        Mamba3,
        {
            **{"d_model": 16, "d_state": 8, "headdim": 4, "rope_fraction": 0.5},
            **{"is_mimo": True, "mimo_rank": 2, "is_outproj_norm": True},
        },
        *(-0.042372, 2.120720, 0.0109131, -0.0140472, -0.0174626),
    ),
}


def filled(kind, options) -> nnx.Module:
    """A mixer whose parameter number i, in the original's order, is 0.5 · h(shape, 100 + i)."""
    mixer = kind(rngs=nnx.Rngs(0), **options)
    shapes = {tensor.name: tensor.shape for tensor in packed(mixer)}
    order = [name for name in ORIGINAL_ORDER if name in shapes]
    assert set(order) == set(shapes)
    load(mixer, {name: 0.5 * golden.fill(shapes[name], 100 + i) for i, name in enumerate(order)})
    return mixer


ORIGINAL_ORDER = [
    *("dt_bias", "A_log", "B_bias", "C_bias", "mimo_x", "mimo_z", "mimo_o", "D"),
    *("in_proj.weight", "in_proj.bias", "conv1d.weight", "conv1d.bias"),
    *("x_proj.weight", "dt_proj.weight", "dt_proj.bias"),
    *("B_norm.weight", "C_norm.weight", "norm.weight", "out_proj.weight", "out_proj.bias"),
]


def assert_numbers(y, total, absolute, first, middle, last):
    flat = np.asarray(y, np.float64).ravel()
    got = (flat.sum(), np.abs(flat).sum(), flat[0], flat[flat.size // 2], flat[-1])
    np.testing.assert_allclose(got, (total, absolute, first, middle, last), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", sorted(GOLDEN_NUMBERS))
def test_golden_numbers(name):
    """Groups of more than one head and fewer than all, a limit on dt, a narrower scan."""
    kind, options, *numbers = GOLDEN_NUMBERS[name]
    shape = (2, 7, options["d_model"])
    mixer = filled(kind, options)
    u = jnp.asarray(golden.fill(shape, 1))
    assert_numbers(call(mixer, u), *numbers)
    cache, outputs = mixer.init_cache(2), []
    for t in range(7):
        y, cache = call(mixer, u[:, t : t + 1], cache=cache)
        outputs.append(y)
    assert_numbers(jnp.concatenate(outputs, axis=1), *numbers)


@pytest.mark.parametrize("lengths", [(3, 1, 3), (2, 5), (1,) * 7], ids=str)
def test_a_second_prefill_reads_the_cache(lengths):
    kind, options, *numbers = GOLDEN_NUMBERS["G7"]
    mixer, u = filled(kind, options), jnp.asarray(golden.fill((2, 7, 16), 1))
    cache, outputs, start = mixer.init_cache(2), [], 0
    for length in lengths:
        y, cache = call(mixer, u[:, start : start + length], cache=cache)
        outputs.append(y)
        start += length
    assert_numbers(jnp.concatenate(outputs, axis=1), *numbers)


def test_packed_documents_of_any_length():
    """Lengths [3, 5, 6, 2], two of them shorter than the convolution (case T13)."""
    kind, options, *_ = GOLDEN_NUMBERS["G7"]
    mixer, u = filled(kind, options), jnp.asarray(golden.fill((1, 16, 16), 1))
    lengths = [3, 5, 6, 2]
    seq_idx = jnp.asarray(np.repeat(np.arange(4), lengths)[None], jnp.int32)
    y = np.asarray(call(mixer, u, seq_idx), np.float64)
    assert y.sum() == pytest.approx(-12.274221, abs=1e-3)
    assert np.abs(y).sum() == pytest.approx(90.466312, rel=1e-5)


@pytest.mark.parametrize("batch", [1, 2])
def test_left_padding_is_invisible(batch):
    """Three tokens of junk before the real ones (case T15)."""
    kind, options, *_ = GOLDEN_NUMBERS["G7"]
    mixer = filled(kind, options)
    real = jnp.tile(jnp.asarray(golden.fill((1, 5, 16), 1)), (batch, 1, 1))
    junk = jnp.tile(jnp.asarray(golden.fill((1, 3, 16), 77)), (batch, 1, 1))
    seq_idx = jnp.tile(jnp.asarray([[-1] * 3 + [0] * 5], jnp.int32), (batch, 1))
    state = mixer.init_cache(batch)._replace(
        ssm=jnp.tile(jnp.asarray(golden.fill((1, 6, 4, 6), 5)), (batch, 1, 1, 1))
    )
    padded = jnp.concatenate([junk, real], axis=1)
    assert_close("y", call(mixer, padded, seq_idx)[:, 3:], call(mixer, real), GOLDEN_OUT)
    got, _ = call(mixer, padded, seq_idx, state)
    wanted, _ = call(mixer, real, cache=state)
    assert_close("y after a prefix", got[:, 3:], wanted, GOLDEN_OUT)


@pytest.mark.parametrize(
    ("name", "sums"),
    [
        (
            "G8a",
            {
                **{"u": 39.671855, "in_proj.weight": 209.714, "dt_bias": 0.928708},
                **{"B_bias": 9.91958, "C_bias": 11.0255},
            },
        ),
        ("G8c", {"u": 1.976526, "mimo_x": 0.70871, "mimo_z": 0.884439, "mimo_o": 0.910825}),
        (
            "G7",
            {"u": 133.35366, "in_proj.weight": 512.736, "A_log": 2.6589, "dt_bias": 1.34796},
        ),
    ],
)
def test_golden_gradients(name, sums):
    """Sums of |gradient| of Σ y · h(y, 11) (case T18d)."""
    kind, options, *_ = GOLDEN_NUMBERS[name]
    mixer, u = filled(kind, options), jnp.asarray(golden.fill((2, 7, 16), 1))
    cotangent = jnp.asarray(golden.fill((2, 7, 16), 11))
    loss = jax.jit(jax.grad(lambda m, u: jnp.sum(m(u) * cotangent), argnums=(0, 1)))
    grads, du = loss(mixer, u)
    got = {"u": du} | {
        tensor.name: tensor.assemble(lambda path, layer: np.asarray(parameter(grads, path)[...]))
        for tensor in packed(mixer)
    }
    for key, wanted in sums.items():
        assert np.abs(got[key]).sum() == pytest.approx(wanted, rel=1e-4), key


@pytest.mark.parametrize(
    ("activation", "wanted"),
    [
        ("heavy_tail", [-1e-4, -0.1, -0.25, -0.5, -1, -3, -21]),
        ("softplus", [-1e-4, -1.234e-4, -0.048587, -0.313262, -0.693147, -2.126928, -20]),
    ],
)
def test_mamba3_decay_rates(activation, wanted):
    """A = min(-f(dd_A), -floor), and no gradient where the floor bites (case T17)."""
    mixer = Mamba3(64, A_activation=activation, rngs=nnx.Rngs(0))
    dd_A = jnp.asarray([-1e6, -9, -3, -1, 0, 2, 20.0])
    np.testing.assert_allclose(mixer._A(dd_A), wanted, rtol=1e-4)
    slope = jax.vmap(jax.grad(mixer._A))(dd_A)
    if activation == "heavy_tail":
        np.testing.assert_allclose(slope, [0, -0.01, -0.0625, -0.25, -1, -1, -1], rtol=1e-5)
    assert slope[0] == 0


def test_attention_golden_numbers():
    """Grouped heads, a fused MLP, a convolution and partial rotary (G9)."""
    config = AttentionConfig(
        d_model=16,
        num_heads=4,
        num_heads_kv=2,
        head_dim=8,
        mlp_dim=256,
        causal=True,
        d_conv=4,
        rotary_emb_dim=4,
    )
    attention = MHA(config, rngs=nnx.Rngs(0))
    shapes = {tensor.name: tensor.shape for tensor in packed(attention)}
    order = [name for name in ORIGINAL_ORDER if name in shapes]
    fills = {name: 0.5 * golden.fill(shapes[name], 100 + i) for i, name in enumerate(order)}
    load(attention, fills)
    u = jnp.asarray(golden.fill((2, 7, 16), 1))
    numbers = (-13.402703, 225.481835, 2.5970843, -0.3446669, 0.0627681)
    assert_numbers(call(attention, u), *numbers)
    cache, outputs = attention.init_cache(2, max_length=7), []
    for length in (1, 2, 1, 3):
        start = sum(y.shape[1] for y in outputs)
        y, cache = call(attention, u[:, start : start + length], cache=cache)
        outputs.append(y)
    assert_numbers(jnp.concatenate(outputs, axis=1), *numbers)
