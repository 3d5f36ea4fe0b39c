# SPDX-License-Identifier: Apache-2.0
"""`ssd` against the strongest JAX rival and plain XLA, side by side on one card.

    python -m benchmarks.ssd [--rows NAME ...] [--no-xla] [--out FILE]
    python -m benchmarks.ssd --kernels [--rows NAME ...]      where our time goes

Every time includes what the module hands over: raw dt, dt_bias and softplus, cumulative sums, D,
arrays batch first. The rival is PyPI `jax-linear-attention` (its `mamba2_ssd`, which was the
faster with its gradients of B and C summed per group); without it installed its cells are empty.
"""

import argparse
import pathlib

import jax
import jax.numpy as jnp

from benchmarks import timing
from benchmarks.kernel_times import print_kernel_times
from pallas_kernels import ssd
from pallas_kernels.ssd.shapes import SHAPES

ROWS = ("mamba2_1.3b", "mamba2_2.7b", "mamba2_1.3b_long", "mamba2_130m")
# Milliseconds, forward and forward + backward: what this project aims at, and the rival as measured
# before on the same kind of card.
TARGETS = {
    "mamba2_1.3b": (0.13, 0.62),
    "mamba2_2.7b": (0.19, 0.80),
    "mamba2_1.3b_long": (0.62, 2.7),
    "mamba2_130m": (0.06, 0.27),
}
# Measured on the H200: bytes a second of a copy, bf16 operations a second of a matrix product.
COPY, MATMUL = 4.27e12, 695e12


def inputs(b, t, h, p, g, n, seed=0):
    """Random inputs with the decays of a trained model's range, and a cotangent of y."""
    keys = jax.random.split(jax.random.key(seed), 8)
    bf16 = jnp.bfloat16
    arrays = {
        "x": jax.random.normal(keys[0], (b, t, h, p), bf16),
        "dt": jax.random.normal(keys[1], (b, t, h), bf16),
        "A": -jnp.exp(jax.random.uniform(keys[2], (h,), minval=0.0, maxval=2.77)),
        "B": jax.random.normal(keys[3], (b, t, g, n), bf16),
        "C": jax.random.normal(keys[4], (b, t, g, n), bf16),
        "D": jax.random.normal(keys[5], (h,)),
        "dt_bias": jax.random.normal(keys[6], (h,)) - 3,
    }
    return arrays, jax.random.normal(keys[7], (b, t, h, p), bf16)


def ours(implementation):
    """Our op, its final state dropped."""

    def run(arrays):
        return ssd(**arrays, dt_softplus=True, implementation=implementation)[0]

    return run


def rival(grouped):
    """The rival's op; softplus and bias outside it, as its own layer does."""
    from jla.layers.ssm import mamba2_ssd

    def run(arrays):
        a = arrays
        step = jax.nn.softplus(a["dt"].astype(jnp.float32) + a["dt_bias"])
        y, _ = mamba2_ssd(a["x"], step, a["A"], a["B"], a["C"], d=a["D"], grouped_key_grads=grouped)
        return y

    return run


def with_gradient(run):
    """Forward and backward: y and every gradient for a given cotangent."""

    def both(arrays, cotangent):
        y, pullback = jax.vjp(run, arrays)
        return y, pullback(cotangent)

    return jax.jit(both)


def floors(b, t, h, p, g, n):
    """Least milliseconds by bytes and by products, forward and forward + backward."""
    tokens = b * t * h
    maps = 2 * b * t * g * n * 2
    forward_bytes = tokens * (2 * p * 2 + 2) + maps
    backward_bytes = tokens * (3 * p * 2 + 4) + 2 * maps
    # Chunks of 64: G and the product with it, state in and out; the same again with gradients.
    forward_flops = tokens * (2 * 64 * p + 4 * p * n) + b * t * g * 2 * 64 * n
    backward_flops = tokens * (4 * 64 * p + 12 * p * n) + b * t * g * 6 * 64 * n

    def milliseconds(num_bytes, flops):
        return 1e3 * max(num_bytes / COPY, flops / MATMUL)

    forward = milliseconds(forward_bytes, forward_flops)
    return forward, forward + milliseconds(backward_bytes, backward_flops)


def measure(run, arrays, cotangent):
    """(forward, forward + backward) milliseconds, or the error."""
    try:
        forward = timing.milliseconds(jax.jit(run), arrays)
        return forward, timing.milliseconds(with_gradient(run), arrays, cotangent)
    except Exception as error:  # A contender that fails leaves an empty cell, not no table.
        return f"{type(error).__name__}: {str(error)[:300]}"


def contenders(no_xla):
    """Name → function of the arrays."""
    chosen = {"mosaic": ours("mosaic")}
    try:
        chosen["rival"] = rival(grouped=True)
    except ImportError as error:
        print(f"rival not installed: {error}")
    return chosen if no_xla else chosen | {"xla": ours("xla")}


def show_kernels(rows):
    """Prints the kernels of our forward + backward with their times."""
    run = ours("mosaic")
    for row in rows:
        arrays, cotangent = inputs(**SHAPES[row])
        print_kernel_times(f"{row} forward + backward", with_gradient(run), arrays, cotangent)


def main():
    """Prints the table and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", nargs="*", default=ROWS, choices=sorted(SHAPES))
    parser.add_argument("--no-xla", action="store_true")
    parser.add_argument("--out", type=pathlib.Path, default=timing.RESULTS / "ssd.json")
    parser.add_argument("--kernels", action="store_true")
    options = parser.parse_args()
    if options.kernels:
        return show_kernels(options.rows)
    results = {}
    print(f"{'':18}{'':15}{'fwd':>8}{'fwd+bwd':>9}   ms on {jax.devices()[0].device_kind}")
    for row in options.rows:
        arrays, cotangent = inputs(**SHAPES[row])
        floor = floors(**SHAPES[row])
        results[row] = {"shape": SHAPES[row], "floor_ms": floor, "target_ms": TARGETS.get(row)}
        print(f"{row:18}{'floor':15}{floor[0]:8.3f}{floor[1]:9.3f}", flush=True)
        for name, run in contenders(options.no_xla).items():
            times = measure(run, arrays, cotangent)
            results[row][name] = times
            if isinstance(times, str):
                print(f"{row:18}{name:15}{times}", flush=True)
                continue
            share = floor[0] / times[0], floor[1] / times[1]
            print(
                f"{row:18}{name:15}{times[0]:8.3f}{times[1]:9.3f}"
                f"   {share[0]:4.0%} {share[1]:4.0%} of the floor",
                flush=True,
            )
        timing.save(options.out, {"unit": "ms", "fields": ["fwd", "fwd+bwd"], "rows": results})


if __name__ == "__main__":
    main()
