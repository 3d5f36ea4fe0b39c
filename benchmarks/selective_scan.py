# SPDX-License-Identifier: Apache-2.0
"""`selective_scan` on one card: our kernels, the strongest JAX rival and plain XLA, side by side.

    python -m benchmarks.selective_scan [--rows NAME ...] [--contenders NAME ...] [--out FILE]

Every time includes what the module hands over: raw dt, dt_bias and softplus, D, the gate z, arrays
batch first. The rival is PyPI `jax-linear-attention`; without it its cells are empty. The floor is
what the card's special-function units (an exponential per token, channel and state; four more for
softplus and gate) or a copy of the bytes would take.
"""

import argparse
import pathlib

import jax
import jax.numpy as jnp

from benchmarks import timing
from pallas_kernels import selective_scan
from pallas_kernels.selective_scan.shapes import SHAPES

ROWS = ("mamba1_1.4b", "mamba1_1.4b_long", "mamba1_130m")
# Milliseconds, forward and forward + backward.
TARGETS = {
    "mamba1_1.4b": (0.36, 1.8),
    "mamba1_1.4b_long": (1.6, 7.5),
    "mamba1_130m": (0.06, 0.26),
}
# Measured on the H200: bytes a second of a copy. Exponentials a second: 132 multiprocessors, 16 a
# cycle each, at 1.755 GHz.
COPY, EXPONENTIALS = 4.27e12, 3.7e12


def inputs(b, t, e, n, g, seed=0):
    """Random inputs with the steps and decays of a fresh Mamba-1, and a cotangent of y."""
    keys = jax.random.split(jax.random.key(seed), 9)
    bf16 = jnp.bfloat16
    arrays = {
        "x": jax.random.normal(keys[0], (b, t, e), bf16),
        "dt": jax.random.normal(keys[1], (b, t, e), bf16),
        "A": -jnp.exp(jax.random.uniform(keys[2], (e, n), minval=0.0, maxval=2.77)),
        "B": jax.random.normal(keys[3], (b, t, g, n), bf16),
        "C": jax.random.normal(keys[4], (b, t, g, n), bf16),
        "D": jax.random.normal(keys[5], (e,)),
        "z": jax.random.normal(keys[6], (b, t, e), bf16),
        "dt_bias": jax.random.normal(keys[7], (e,)) - 3,
    }
    return arrays, jax.random.normal(keys[8], (b, t, e), bf16)


def ours(implementation):
    """Our op, its final state dropped."""

    def run(arrays):
        return selective_scan(**arrays, dt_softplus=True, implementation=implementation)[0]

    return run


def rival():
    """The rival's op."""
    from jla import ops

    def run(arrays):
        a = arrays
        out = ops.linear_attention(
            "mamba1", a["C"][:, :, 0], a["B"][:, :, 0], a["x"], dt=a["dt"], a=a["A"], d=a["D"],
            z=a["z"], dt_bias=a["dt_bias"], dt_softplus=True, output_final_state=False,
        )  # fmt: skip
        return out[0] if isinstance(out, tuple) else out

    return run


def contenders(names):
    """Name → function of the arrays."""
    chosen = {name: ours(name) for name in ("mosaic", "triton", "xla") if name in names}
    if "rival" in names:
        try:
            chosen["rival"] = rival()
        except ImportError as error:
            print(f"rival not installed: {error}")
    return chosen


def floors(b, t, e, n, g):
    """Least milliseconds, forward and forward + backward, of one walk each way."""
    del g
    forward = max(b * t * e * (n + 4) / EXPONENTIALS, b * t * e * 8 / COPY)
    # Backward: the states again, two more exponentials for the gate and two for softplus.
    backward = max(b * t * e * (n + 4) / EXPONENTIALS, b * t * e * 14 / COPY)
    return 1e3 * forward, 1e3 * (forward + backward)


def with_gradient(run):
    """Forward and backward: y and every gradient for a given cotangent."""

    def both(arrays, cotangent):
        y, pullback = jax.vjp(run, arrays)
        return y, pullback(cotangent)

    return jax.jit(both)


def measure(run, arrays, cotangent):
    """(forward, forward + backward) milliseconds, or the error."""
    try:
        forward = timing.milliseconds(jax.jit(run), arrays)
        return forward, timing.milliseconds(with_gradient(run), arrays, cotangent)
    except Exception as error:  # A contender that fails leaves an empty cell, not no table.
        return f"{type(error).__name__}: {str(error)[:300]}"


def main():
    """Prints the table and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", nargs="*", default=ROWS, choices=sorted(SHAPES))
    names = ["mosaic", "triton", "rival", "xla"]
    parser.add_argument("--contenders", nargs="*", default=names, choices=names)
    parser.add_argument("--out", type=pathlib.Path, default=timing.RESULTS / "selective_scan.json")
    options = parser.parse_args()
    results = {}
    print(f"{'':18}{'':10}{'fwd':>8}{'fwd+bwd':>9}   ms on {jax.devices()[0].device_kind}")
    for row in options.rows:
        arrays, cotangent = inputs(**SHAPES[row])
        floor = floors(**SHAPES[row])
        results[row] = {"shape": SHAPES[row], "floor_ms": floor, "target_ms": TARGETS.get(row)}
        print(f"{row:18}{'floor':10}{floor[0]:8.3f}{floor[1]:9.3f}", flush=True)
        for name, run in contenders(options.contenders).items():
            times = results[row][name] = measure(run, arrays, cotangent)
            # After each cell: a run that is cut short keeps what it has.
            timing.save(options.out, {"unit": "ms", "fields": ["fwd", "fwd+bwd"], "rows": results})
            if isinstance(times, str):
                print(f"{row:18}{name:10}{times}", flush=True)
            else:
                print(f"{row:18}{name:10}{times[0]:8.3f}{times[1]:9.3f}", flush=True)


if __name__ == "__main__":
    main()
