# SPDX-License-Identifier: Apache-2.0
"""`mamba3_scan`: golden vectors, every output and gradient against float64, known faults."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import Mamba3State, explain, mamba3_scan, seq_idx_from_cu_seqlens
from pallas_kernels.mamba3_scan import rotary
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


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", golden.names("m3siso") + golden.names("m3mimo"))
def test_golden_vectors(name, implementation):
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


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", TESTS)
def test_every_output_and_gradient(name, implementation):
    """fp32 against the float64 definition, from a given state, in ragged chunks."""
    sizes = TESTS[name]
    arrays, initial = random(1, sizes, mimo=name.startswith("mimo")), state(2, sizes)
    got = outputs_and_gradients(arrays, initial, None, implementation=implementation, chunk_size=8)
    wanted = in_float64(arrays, initial, None)
    assert_same(got, wanted, tolerances.FP32_OUT, tolerances.FP32_GRAD)


@pytest.mark.parametrize("chunk_size", [1, 16, 200])
def test_chunk_size_changes_nothing(chunk_size):
    sizes = TESTS["mimo_rank2"]
    arrays, initial = random(3, sizes), state(4, sizes)
    got = outputs_and_gradients(arrays, initial, None, implementation="xla", chunk_size=chunk_size)
    assert_same(got, in_float64(arrays, initial, None), tolerances.FP32_OUT, tolerances.FP32_GRAD)


@pytest.mark.parametrize("name", ["siso", "mimo_rank2"])
def test_stretches_of_several_chunks(name, monkeypatch):
    """As on a GPU, where many chunks are handled at once; packed and padded too."""
    monkeypatch.setattr("pallas_kernels.mamba3_scan.xla._HEAD_CHUNKS", {"cpu": 24})
    sizes = TESTS[name]
    arrays, initial = random(5, sizes), state(6, sizes)
    seq_idx = np.repeat([3, -1, 3, 0, -1, 4, 0], [2, 2, 5, 9, 3, 15, 1])[None].repeat(2, axis=0)
    seq_idx[1] = np.roll(seq_idx[1], 11)
    for ids in (None, seq_idx) if name == "siso" else (seq_idx,):
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
    y, _ = mamba3_scan(**siso, implementation=implementation)
    scale = jax.lax.rsqrt(jnp.mean(y**2, axis=-1, keepdims=True) + 1e-3)
    normed = y * scale * norm_weight[None, None]
    y, _ = mamba3_scan(
        **siso, z=z, norm_weight=norm_weight, norm_eps=1e-3, implementation=implementation
    )
    assert_close("y", y, normed * jax.nn.silu(z), tolerances.FP32_OUT, norm_error)
    mimo = random(10, TESTS["mimo_rank2"])
    output_weight = mimo.pop("mimo_o")
    apart, _ = mamba3_scan(**mimo, implementation=implementation)
    together, _ = mamba3_scan(**mimo, mimo_o=output_weight, implementation=implementation)
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
    y, _ = mamba3_scan(**arrays, implementation=implementation)
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
