# SPDX-License-Identifier: Apache-2.0
"""`mamba3_scan`: golden vectors, every output and gradient against float64, known faults."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import Mamba3State, explain, mamba3_scan, seq_idx_from_cu_seqlens
from pallas_kernels.mamba3_scan import rotary, xla
from pallas_kernels.mamba3_scan.shapes import TESTS, Sizes
from tests import golden, tolerances
from tests.pallas_kernels.mamba3_inputs import (
    FAST_COMPILE,
    IMPLEMENTATIONS,
    assert_same,
    in_float64,
    outputs_and_gradients,
    part,
    random,
    scan,
    state,
    turns,
)
from tests.tolerances import assert_close, norm_error

NAMES = {
    "Q": "C",
    "K": "B",
    "V": "x",
    "ADT": "log_decay",
    "DT": "dt",
    "Trap": "trap",
    "Q_bias": "C_bias",
    "K_bias": "B_bias",
    "Angles": "angles",
    "D": "D",
    "Z": "z",
    "MIMO_V": "mimo_x",
    "MIMO_Z": "mimo_z",
    "MIMO_Out": "mimo_o",
    "norm_weight": "norm_weight",
    "y": "y",
    "final_angle_state": "final.angle",
    "final_ssm_state": "final.ssm",
    "final_k_state": "final.B",
    "final_v_state": "final.x",
    "angle_state": "initial.angle",
    "ssm_state": "initial.ssm",
    "k_state": "initial.B",
    "v_state": "initial.x",
}
# The golden README's bounds; those it states looser are looser in this file too.
LOOSE = (
    "m3siso_bare_g2_rope10_L40_states",
    "m3mimo_r2_Z_rope05_L37",
    "m3mimo_r2_Z_fusednorm_L24",
)


def ours(arrays: dict, is_siso: bool) -> dict:
    """Arrays by our names, with a rank axis where SISO files have none."""
    axis = {"Q": 2, "K": 2, "Q_bias": 1, "K_bias": 1, "k_state": 1, "final_k_state": 1}
    expand = {
        k: np.expand_dims(v, axis[k]) if is_siso and k in axis else v for k, v in arrays.items()
    }
    return {NAMES[k]: v for k, v in expand.items() if k in NAMES}


# The definition on all of them, the chunked form on those with the most in them.
GOLDEN = [("reference", name) for name in golden.names("m3siso") + golden.names("m3mimo")] + [
    ("xla", name)
    for name in ("m3siso_varlen", "m3siso_bare_g2_rope10_L40_states", "m3mimo_r2_Z_fusednorm_L24")
]


@pytest.mark.parametrize(("implementation", "name"), GOLDEN)
def test_golden_vectors(implementation, name):
    case = golden.load(name)
    is_siso = name.startswith("m3siso")
    arrays = ours(case.inputs, is_siso)
    initial = {k: arrays.pop(f"initial.{k}", None) for k in Mamba3State._fields}
    initial = None if initial["ssm"] is None else Mamba3State(**initial)
    seq_idx, options = None, {"norm_eps": case.options.get("norm_eps", 1e-5)}
    outputs, cotangents = (ours(v, is_siso) for v in (case.outputs, case.cotangents))
    if "cu_seqlens" in case.inputs:
        seq_idx = seq_idx_from_cu_seqlens(case.inputs["cu_seqlens"], arrays["x"].shape[1])
        options["num_documents"] = len(case.inputs["cu_seqlens"]) - 1
        outputs = {k: v if k == "y" else v[None] for k, v in outputs.items()}
    cotangents = {k: np.asarray(v, np.float32) for k, v in cotangents.items()}
    got, gradients = outputs_and_gradients(
        arrays, initial, seq_idx, cotangents, implementation=implementation, chunk_size=8, **options
    )
    for output, wanted in outputs.items():
        pair = (got[output], wanted)
        if output == "final.angle":
            pair = tuple(turns(angle) for angle in pair)
        bound = 5e-5 if name in LOOSE else tolerances.GOLDEN_OUT
        assert_close(output, *pair, bound)
    for argument, wanted in ours(case.grads, is_siso).items():
        assert_close(f"gradient of {argument}", gradients[argument], wanted, tolerances.GOLDEN_GRAD)


@pytest.mark.parametrize("name", TESTS)
def test_every_output_and_gradient(name):
    """fp32 against the float64 definition, from a given state, in ragged chunks."""
    implementation = "xla"
    sizes = TESTS[name]
    arrays, initial = random(1, sizes, mimo=name.startswith("mimo")), state(2, sizes)
    got = outputs_and_gradients(arrays, initial, None, implementation=implementation, chunk_size=8)
    wanted = in_float64(arrays, initial, None)
    assert_same(got, wanted, tolerances.FP32_OUT, tolerances.FP32_GRAD)


@pytest.mark.parametrize("chunk_size", [1, 200])
def test_chunk_size_changes_nothing(chunk_size):
    sizes = TESTS["mimo_rank2"]
    arrays, initial = random(3, sizes), state(4, sizes)
    got = outputs_and_gradients(arrays, initial, None, implementation="xla", chunk_size=chunk_size)
    assert_same(got, in_float64(arrays, initial, None), tolerances.FP32_OUT, tolerances.FP32_GRAD)


@pytest.mark.parametrize(("name", "packed"), [("siso", True), ("mimo_rank2", False)])
def test_stretches_of_several_chunks(name, packed, monkeypatch):
    """As on a GPU, where many chunks are handled at once; packed and padded too."""
    monkeypatch.setattr(xla, "_HEAD_CHUNKS", {"cpu": 24})
    sizes = TESTS[name]
    arrays, initial = random(5, sizes), state(6, sizes)
    seq_idx = np.repeat([3, -1, 3, 0, -1, 4, 0], [2, 2, 5, 9, 3, 15, 1])[None].repeat(2, axis=0)
    seq_idx[1] = np.roll(seq_idx[1], 11)
    for ids in (seq_idx if packed else None,):
        # A jit of its own: the patched number is part of no cache key.
        function = jax.jit(
            lambda *args: outputs_and_gradients.__wrapped__(
                *args, implementation="xla", chunk_size=4
            ),
            compiler_options=FAST_COMPILE,
        )
        got = function(arrays, initial, ids)
        wanted = in_float64(arrays, initial, ids)
        assert_same(got, wanted, tolerances.FP32_OUT, tolerances.FP32_GRAD)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_without_optional_arguments_and_with_shared_angles(implementation):
    """Angles shared by the heads (axis 1) equal repeated ones; their gradient is the heads' sum."""
    sizes = TESTS["siso"]
    arrays = random(7, sizes, bare=True)
    shared = arrays | {"angles": arrays["angles"][:, :, :1]}
    repeated = shared | {"angles": shared["angles"].repeat(sizes.h, axis=2)}
    got = outputs_and_gradients(shared, None, None, implementation=implementation)
    outputs, gradients = in_float64(repeated, None, None)
    gradients["angles"] = gradients["angles"].sum(axis=2, keepdims=True)
    assert_same(got, (outputs, gradients), tolerances.FP32_OUT, tolerances.FP32_GRAD)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_siso_norm_and_ranks_kept_apart(implementation):
    siso = random(8, TESTS["siso"])
    norm_weight, z = random(9, TESTS["siso"])["x"][0, 0], siso.pop("z")
    y, _ = scan(**siso, implementation=implementation)
    scale = jax.lax.rsqrt(jnp.mean(y**2, axis=-1, keepdims=True) + 1e-3)
    normed = y * scale * norm_weight[None, None]
    y, _ = scan(**siso, z=z, norm_weight=norm_weight, norm_eps=1e-3, implementation=implementation)
    assert_close("y", y, normed * jax.nn.silu(z), tolerances.FP32_OUT, norm_error)
    mimo = random(10, TESTS["mimo_rank2"])
    output_weight = mimo.pop("mimo_o")
    apart, _ = scan(**mimo, implementation=implementation)
    together, _ = scan(**mimo, mimo_o=output_weight, implementation=implementation)
    assert apart.shape == (2, 37, 2, 4, 3)
    summed = jnp.sum(apart * jnp.swapaxes(output_weight, 0, 1)[None, None], axis=2)
    assert_close("y", summed, together, tolerances.FP32_OUT, norm_error)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_groups_are_blocks_of_heads(implementation):
    """T7: with C only in group 1 of 4, exactly heads 4 ... 7 of 16 respond."""
    sizes = Sizes(b=1, t=3, h=16, p=2, n=4, g=4, a=1)
    arrays = random(11, sizes, bare=True)
    arrays["C"][:, :, :, [0, 2, 3]] = 0
    arrays["C_bias"][:] = 0
    y, _ = scan(**arrays, implementation=implementation)
    assert np.flatnonzero(np.any(np.asarray(y) != 0, axis=(0, 1, 3))).tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize(("implementation", "t"), [("reference", 4096), ("xla", 65536)])
def test_angles_stay_exact_over_long_sequences(implementation, t):
    """T19: equal increments, off by at most 5e-3 after 65 536; plain float32 sums by 0.13."""
    one = jnp.ones((1, t, 1))
    arrays = {
        "x": one[..., None],
        "dt": 0.05 * one,
        "log_decay": -one,
        "B": jnp.ones((1, t, 1, 1, 2)),
        "C": jnp.ones((1, t, 1, 1, 2)),
        "trap": one,
        "angles": one[..., None],
        "B_bias": jnp.zeros((1, 1, 2)),
        "C_bias": jnp.zeros((1, 1, 2)),
    }
    _, final = jax.jit(lambda a: mamba3_scan(**a, implementation=implementation))(arrays)
    increment = np.pi * np.tanh(1.0) * np.float64(np.float32(0.05))
    off = float(final.angle[0, 0, 0]) - increment * t
    assert abs(off - 2 * np.pi * np.round(off / (2 * np.pi))) <= 5e-3 * t / 65536


def test_wrap_keeps_the_angle_and_its_gradient():
    angle = jnp.asarray([0.0, 3.0, -3.2, 100.0, -12345.678], jnp.float32)
    wrapped = rotary.wrap(angle)
    assert float(jnp.max(jnp.abs(wrapped))) <= np.pi + 1e-6
    assert_close("turns", turns(wrapped), turns(angle), 1e-6)
    assert np.array_equal(jax.grad(lambda v: jnp.sum(rotary.wrap(v)))(angle), np.ones(5))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("decay", [-1e3, -1e6, -np.inf, 0.0])
def test_extreme_decays_and_steps(implementation, decay):
    """T2: a token that forgets everything leaves the sums behind it exact; all stays finite."""
    sizes = TESTS["siso"]
    arrays, initial = random(12, sizes), state(13, sizes)
    arrays["log_decay"][:, 5] = decay
    arrays["log_decay"][:, 20] = -80
    arrays["dt"][:, 9] = 1e-8
    arrays["trap"][:, 3:6] = 60
    arrays["trap"][:, 30] = -60
    got = outputs_and_gradients(arrays, initial, None, implementation=implementation, chunk_size=32)
    assert all(np.isfinite(v).all() for v in jax.tree.leaves(got))
    assert_same(got, in_float64(arrays, initial, None), tolerances.FP32_OUT, tolerances.FP32_GRAD)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_later_tokens_change_nothing_before_them(implementation):
    """T22: outputs before a changed token are bit-identical, and a repeated run is."""
    sizes = TESTS["siso"]
    arrays = random(14, sizes)
    run = jax.jit(lambda a: mamba3_scan(**a, implementation=implementation, chunk_size=8)[0])
    y = run(arrays)
    assert np.array_equal(y, run(arrays))
    k = 21
    for name in ("x", "B", "C", "angles", "z", "log_decay"):
        changed = dict(arrays)
        changed[name] = arrays[name].copy()
        changed[name][:, k:] *= 1.5
        other = run(changed)
        assert np.array_equal(other[:, :k], y[:, :k]), name
        assert not np.array_equal(other[:, k:], y[:, k:]), name


def test_gradients_repeat_bit_for_bit():
    sizes = TESTS["mimo_rank2"]
    arrays, initial = random(15, sizes), state(16, sizes)
    first = outputs_and_gradients(arrays, initial, None, implementation="xla", chunk_size=8)
    second = outputs_and_gradients(arrays, initial, None, implementation="xla", chunk_size=8)
    assert jax.tree.all(jax.tree.map(np.array_equal, first, second))


@pytest.mark.parametrize("name", ["siso", "mimo_bf16"])
def test_bf16(name):
    """Against the fp32 definition on the same rounded inputs."""
    sizes = TESTS[name]
    arrays = random(17, sizes)
    rounded = {
        k: jnp.asarray(v, jnp.bfloat16) if k in ("x", "B", "C", "z") else v
        for k, v in arrays.items()
    }
    got = outputs_and_gradients(rounded, None, None, implementation="xla", chunk_size=16)
    assert got[0]["y"].dtype == jnp.bfloat16 and got[0]["final.ssm"].dtype == jnp.float32
    exact = {k: jnp.asarray(v, jnp.float32) for k, v in rounded.items()}
    wanted = outputs_and_gradients(exact, None, None, implementation="reference")
    assert_same(got, wanted, tolerances.BF16_OUT, tolerances.BF16_GRAD)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_float64(implementation):
    sizes = TESTS["mimo_rank2"]
    arrays, initial = random(18, sizes), state(19, sizes)
    wanted = in_float64(arrays, initial, None)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda v: np.asarray(v, np.float64), (arrays, initial))
        got = outputs_and_gradients(*wide, None, implementation=implementation, chunk_size=8)
        assert got[0]["y"].dtype == jnp.float64 and got[0]["final.B"].dtype == jnp.float64
        assert_same(got, wanted, 1e-12, 1e-12)


def test_vmap_and_remat():
    sizes = TESTS["siso"]
    arrays = random(20, sizes)
    per_row = {k: v[:, None] for k, v in part(arrays, slice(None), slice(9)).items() if v.ndim > 2}
    per_row = {k: v for k, v in per_row.items() if k not in ("B_bias", "C_bias")}
    shared = {k: v for k, v in arrays.items() if k not in per_row}

    @jax.remat
    def loss(per_row):
        return jnp.sum(mamba3_scan(**per_row, **shared, implementation="xla", chunk_size=4)[0] ** 2)

    mapped = jax.jit(jax.vmap(jax.grad(loss)))(per_row)
    whole = jax.jit(jax.grad(loss))({k: v[:, 0] for k, v in per_row.items()})
    for name, value in whole.items():
        assert_close(name, mapped[name][:, 0], value, tolerances.FP32_GRAD, norm_error)


def test_backward_keeps_only_states():
    """The loop's gradient needs less room than one per-head B of the whole sequence."""
    sizes = Sizes(b=1, t=1024, h=4, p=4, n=64, g=1, a=16)
    arrays = random(21, sizes)
    loss = jax.jit(jax.grad(lambda a: jnp.sum(mamba3_scan(**a, implementation="xla")[0])))
    temp = loss.lower(arrays).compile().memory_analysis().temp_size_in_bytes
    per_head = sizes.t * sizes.h * sizes.n * 4
    assert temp < 2 * per_head, f"{temp} bytes, per-head B and C have {2 * per_head}"


BAD = {
    "B must have shape (b, t, r, g, n)": {"B": np.zeros((2, 37, 2, 10), np.float32)},
    "x must have a real floating dtype": {"x": np.zeros((2, 37, 4, 3), np.int32)},
    "C must have the dtype of x": {"C": np.zeros((2, 37, 1, 2, 10), np.float16)},
    "must divide h=4": {
        "B": np.zeros((2, 37, 1, 3, 10), np.float32),
        "C": np.zeros((2, 37, 1, 3, 10), np.float32),
    },
    "angles must have shape (b, t, h, a)": {"angles": np.zeros((2, 37, 2, 4), np.float32)},
    "at most n/2 angles": {"angles": np.zeros((2, 37, 4, 6), np.float32)},
    "mimo_o needs mimo_x": {"mimo_o": np.zeros((4, 1, 3), np.float32)},
    "mimo_z needs z": {
        "mimo_x": np.zeros((4, 1, 3), np.float32),
        "mimo_z": np.zeros((4, 1, 3), np.float32),
        "z": None,
    },
    "num_documents needs seq_idx": {"num_documents": 2},
    "seq_idx must have shape (b, t)": {"seq_idx": np.zeros((2, 36), np.int32)},
    "initial_state must be a Mamba3State": {"initial_state": (1, 2, 3, 4)},
    "initial_state.ssm must have shape (b, h, p, n)": {
        "initial_state": state(0, TESTS["siso"])._replace(ssm=np.zeros((2, 4, 10, 3), np.float32))
    },
    "chunk_size must be at least 1": {"chunk_size": 0},
    "implementation must be None or one of": {"implementation": "cuda"},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_inputs_are_named(message):
    with pytest.raises((ValueError, TypeError)) as error:
        mamba3_scan(**random(22, TESTS["siso"]) | BAD[message])
    assert message in str(error.value)


def test_ranks_without_mimo_x_are_refused():
    arrays = random(23, TESTS["mimo_rank2"], bare=True)
    del arrays["mimo_x"]
    with pytest.raises(ValueError, match="r=1 ranks without mimo_x; got r=2"):
        mamba3_scan(**arrays)


def test_the_xla_implementation_is_chosen_without_a_gpu():
    assert ": xla" in str(explain(mamba3_scan, **random(24, TESTS["siso"])))
