# SPDX-License-Identifier: Apache-2.0
"""Inputs of the Mamba-3 tests, and one call that gives every output and every gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import Mamba3State, mamba3_scan
from pallas_kernels.mamba3_scan.shapes import Sizes
from tests.tolerances import assert_close, norm_error

IMPLEMENTATIONS = ("reference", "xla")
PER_TOKEN = ("x", "dt", "log_decay", "B", "C", "trap", "angles", "z")


# Compiling is most of these tests' time, and none of them is about speed.
FAST_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
STATIC = ("implementation", "chunk_size", "num_documents", "norm_eps")
# `mamba3_scan`, compiled as a whole.
scan = jax.jit(mamba3_scan, static_argnames=STATIC, compiler_options=FAST_COMPILE)


def random(seed: int, sizes: Sizes, *, mimo: bool | None = None, bare: bool = False) -> dict:
    """Random inputs with a trained model's steps and decays; `mimo` when there are ranks.

    `bare` leaves out every optional argument; without it there are D, z and, for MIMO, all of
    mimo_x, mimo_z, mimo_o and norm_weight.
    """
    r = np.random.default_rng(seed)
    b, t, h, p, n, g, ranks, a = (getattr(sizes, k) for k in ("b", "t", *"hpngra"))

    def normal(*shape):
        return r.normal(size=shape).astype(np.float32)

    dt = np.exp(r.uniform(np.log(1e-2), np.log(0.5), (b, t, h))).astype(np.float32)
    arrays = {
        "x": normal(b, t, h, p),
        "dt": dt,
        "log_decay": -dt * np.exp(r.uniform(-1, 2, (b, t, h))).astype(np.float32),
        "B": normal(b, t, ranks, g, n),
        "C": normal(b, t, ranks, g, n),
        "trap": normal(b, t, h),
        "angles": normal(b, t, h, a),
        "B_bias": 1 + normal(h, ranks, n),
        "C_bias": 1 + normal(h, ranks, n),
    }
    if not bare:
        arrays |= {"D": normal(h), "z": normal(b, t, h, p)}
    if mimo if mimo is not None else ranks > 1:
        arrays["mimo_x"] = normal(h, ranks, p)
        if not bare:
            arrays |= {name: normal(h, ranks, p) for name in ("mimo_z", "mimo_o")}
            arrays["norm_weight"] = normal(h, p)
    return arrays


def state(seed: int, sizes: Sizes, *rows: int) -> Mamba3State:
    """A state with the given leading axes, (b,) when there are none."""
    r = np.random.default_rng(seed)
    rows = rows or (sizes.b,)
    h, p, n, ranks, a = (getattr(sizes, k) for k in "hpnra")
    shapes = ((h, a), (h, p, n), (ranks, h, n), (h, p))
    return Mamba3State(*(r.normal(size=(*rows, *s)).astype(np.float32) for s in shapes))


def packed_ids(seed: int, b: int, t: int, num_documents: int, padding: float) -> np.ndarray:
    """Rows of documents 0 ... s-1 in any order and of any length, some empty, and padding."""
    r = np.random.default_rng(seed)
    rows = []
    for _ in range(b):
        cuts = np.sort(r.integers(0, t + 1, num_documents - 1))
        lengths = np.diff(np.concatenate(([0], cuts, [t])))
        row = np.repeat(r.permutation(num_documents), lengths)
        rows.append(np.where(r.random(t) < padding, -1, row))
    return np.stack(rows).astype(np.int32)


def part(arrays: dict, rows: slice, tokens: slice) -> dict:
    """The arrays of some rows and tokens."""
    return {k: v[rows, tokens] if k in PER_TOKEN else v for k, v in arrays.items()}


def turns(angle) -> np.ndarray:
    """Angles as points of the circle, where they may be compared."""
    angle = np.asarray(angle, np.float64)
    return np.stack((np.cos(angle), np.sin(angle)))


@functools.partial(
    jax.jit,
    compiler_options=FAST_COMPILE,
    static_argnames=(*STATIC, "op"),
)
def outputs_and_gradients(arrays, initial, seq_idx, cotangents=None, *, op=mamba3_scan, **options):
    """Every output by name, and by name the gradients of a fixed combination of all of them.

    The combination weighs each output with `cotangents`, by default with a wave of its own.
    """

    def scalar(arrays, initial):
        y, final = op(**arrays, seq_idx=seq_idx, initial_state=initial, **options)
        outputs = {"y": y, **{f"final.{k}": v for k, v in final._asdict().items()}}
        total = 0.0
        for i, (name, value) in enumerate(outputs.items()):
            # In float64 and rounded once: the same weights whatever the run's precision.
            wave = np.sin(np.arange(value.size) * (1.7 + i) + i).reshape(value.shape)
            wave = wave.astype(np.float32)
            weight = wave if cotangents is None else cotangents.get(name, 0.0)
            total = total + jnp.sum(
                value.astype(jnp.promote_types(value.dtype, jnp.float32)) * weight
            )
        return total, outputs

    gradients, outputs = jax.grad(scalar, argnums=(0, 1), has_aux=True)(arrays, initial)
    named = dict(gradients[0])
    if initial is not None:
        named |= {f"initial.{k}": v for k, v in gradients[1]._asdict().items()}
    return outputs, named


def in_float64(arrays, initial, seq_idx, **options) -> tuple[dict, dict]:
    """Outputs and gradients of the reference in float64."""
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda v: np.asarray(v, np.float64), (arrays, initial))
        results = outputs_and_gradients(*wide, seq_idx, implementation="reference", **options)
        return jax.tree.map(np.asarray, results)


def assert_same(got: tuple[dict, dict], wanted: tuple[dict, dict], out: float, grad: float) -> None:
    """Compares every output and every gradient by name; angles on the circle."""
    for kind, values, references, tolerance in zip(
        ("", "gradient of "), got, wanted, (out, grad), strict=True
    ):
        assert values.keys() == references.keys()
        for name in references:
            pair = values[name], references[name]
            if name == "final.angle":
                pair = tuple(turns(angle) for angle in pair)
            assert_close(f"{kind}{name}", *pair, tolerance, norm_error)
