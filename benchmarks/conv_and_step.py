# SPDX-License-Identifier: Apache-2.0
"""`causal_conv1d` and `selective_state_update` against the speed of a copy.

    python -m benchmarks.conv_and_step [--out FILE]

Bytes counted: convolution x in, y out (and x, dy in, dx out backward); state update the state in
and out. The state is updated in place (donated), as in decoding.
"""

import argparse
import pathlib
import time

import jax
import jax.numpy as jnp

from benchmarks import timing
from pallas_kernels import causal_conv1d, selective_state_update


def copy_speed() -> float:
    """Bytes a second of a copy, read plus written."""
    x = jnp.ones((2**30,), jnp.bfloat16)
    ms = timing.milliseconds(jax.jit(lambda x: x + 1), x)
    return 2 * x.nbytes / ms * 1e3


def conv(implementation=None) -> dict:
    """b4 e5376 t4096, width 4, silu, bf16."""
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (4, 4096, 5376), jnp.bfloat16)
    weight, bias = jax.random.normal(keys[1], (5376, 4)), jax.random.normal(keys[2], (5376,))
    dy = jax.random.normal(keys[3], x.shape, jnp.bfloat16)

    def run(x, weight, bias):
        return causal_conv1d(x, weight, bias, activation="silu", implementation=implementation)[0]

    def both(x, weight, bias, dy):
        y, pullback = jax.vjp(run, x, weight, bias)
        return y, pullback(dy)

    forward = timing.milliseconds(jax.jit(run), x, weight, bias)
    total = timing.milliseconds(jax.jit(both), x, weight, bias, dy)
    return {"ms": [forward, total], "bytes": [2 * x.nbytes, 5 * x.nbytes]}


def step(implementation, dtype) -> dict:
    """b64 h80 p64 n128, one group."""
    keys = jax.random.split(jax.random.key(0), 8)

    def normal(i, *shape):
        return jax.random.normal(keys[i], shape, jnp.bfloat16)

    state = jax.random.normal(keys[0], (64, 80, 64, 128)).astype(dtype)
    arrays = {
        "x": normal(1, 64, 80, 64),
        "dt": normal(2, 64, 80),
        "A": -jnp.exp(normal(3, 80).astype(jnp.float32)),
        "B": normal(4, 64, 1, 128),
        "C": normal(5, 64, 1, 128),
        "D": normal(6, 80).astype(jnp.float32),
        "dt_bias": normal(7, 80).astype(jnp.float32),
    }
    num_bytes = 2 * state.nbytes

    def run(state, arrays):
        return selective_state_update(
            state, **arrays, dt_softplus=True, implementation=implementation
        )

    run = jax.jit(run, donate_argnums=0)
    times = []
    for repeat in range(6):
        start = time.perf_counter()
        for _ in range(50):
            y, state = run(state, arrays)
        jax.block_until_ready((y, state))
        times.append((time.perf_counter() - start) / 50 * 1e3 if repeat else 1e9)
    return {"ms": sorted(times)[2], "bytes": num_bytes}


def main():
    """Prints the table and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, default=timing.RESULTS / "conv_and_step.json")
    options = parser.parse_args()
    copy = copy_speed()
    results = {"copy_bytes_per_second": copy}
    for implementation in ("xla", "mosaic"):
        results[f"causal_conv1d {implementation}"] = conv(implementation)
    for implementation in ("xla", "triton"):
        for dtype in (jnp.float32, jnp.bfloat16):
            name = f"selective_state_update {implementation} {jnp.dtype(dtype).name}"
            try:
                results[name] = step(implementation, dtype)
            except Exception as error:  # An implementation that is missing leaves a reason.
                results[name] = f"{type(error).__name__}: {str(error)[:300]}"
    for name, value in results.items():
        print(name, value, flush=True)
        if isinstance(value, dict):
            ms, num_bytes = value["ms"], value["bytes"]
            pairs = zip(ms, num_bytes, strict=True) if isinstance(ms, list) else [(ms, num_bytes)]
            print("   share of copy:", [f"{b / m * 1e3 / copy:.0%}" for m, b in pairs], flush=True)
    timing.save(options.out, results)


if __name__ == "__main__":
    main()
