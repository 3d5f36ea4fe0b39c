# SPDX-License-Identifier: Apache-2.0
"""Each SSD kernel alone, over its layouts: what `tuned/ssd_mosaic.json` is made from.

python -m benchmarks.ssd_kernels [--rows NAME ...] [--out FILE]
"""

import argparse
import pathlib

import jax
import jax.numpy as jnp

from benchmarks import timing
from benchmarks.ssd import ROWS, inputs
from pallas_kernels.ssd import (
    mosaic_backward,
    mosaic_config,
    mosaic_forward,
    mosaic_rows,
    mosaic_states,
)
from pallas_kernels.ssd.mosaic_sums import decay_rows
from pallas_kernels.ssd.mosaic_tiles import Q
from pallas_kernels.ssd.shapes import SHAPES

FORWARD = (
    mosaic_forward.Config(heads=1, producer=False),
    mosaic_forward.Config(heads=2),
    mosaic_forward.Config(heads=3, producer=False, together=False),
)
STATES = ((1, 3), (2, 3), (2, 4), (4, 2))


def variants(b, t, h, p, g, n):
    """Yields (name, function, arguments) for every kernel and layout of a shape."""
    arrays, dy = inputs(b, t, h, p, g, n)
    x, B, C = arrays["x"], arrays["B"], arrays["C"]
    D = jnp.broadcast_to(arrays["D"][:, None], (h, p))

    @jax.jit
    def prepare(dt, A, bias):
        limits = (0.0, float("inf"))
        step, decay = mosaic_rows.steps_and_decays(dt, A, bias, True, limits, None, None)
        step, decay = mosaic_rows.chunked(step), mosaic_rows.chunked(decay)
        return tuple(decay_rows(step, decay, for_backward=when) for when in (False, True))

    steps = arrays["dt"], arrays["A"], arrays["dt_bias"]
    forward_rows, backward_rows = prepare(*steps)
    yield "rows forward", jax.jit(lambda *a: prepare(*a)[0]), steps
    chunks = t // Q
    counts = mosaic_config.segment_counts(chunks)
    for base in FORWARD:
        for segments in [s for s in (1, 2, 4, 8, 16) if s in counts and b * h * s <= 2048]:
            config = mosaic_forward.Config(**{**vars(base), "segments": segments})
            entering = jnp.zeros((b, segments, h, p, n))

            def forward(x, rows, B, C, D, entering, config=config):
                return mosaic_forward.forward(x, rows, B, C, D, None, entering, config)[0]

            yield f"forward {config}", forward, (x, forward_rows, B, C, D, entering)
    for heads, stages in STATES:
        for segments in [s for s in (1, 4, 8) if s in counts and b * h * s <= 2048]:
            config = mosaic_states.Config(heads, stages, segments)
            for store in (False, True):

                def states(x, rows, B, config=config, store=store):
                    return mosaic_states.states(
                        x, rows, B, None, config, backwards=False, store=store, final=not store
                    )

                yield f"states store={store} {config}", states, (x, forward_rows, B)
    S = R = jax.random.normal(jax.random.key(1), (b, chunks, h, p, n), jnp.bfloat16)
    for splits, stages, early in ((1, 2, False), (1, 2, True), (2, 2, False), (1, 3, False)):
        config = mosaic_backward.Config(splits, stages, early)

        def backward(*a, config=config):
            return mosaic_backward.backward(*a, config)

        yield f"backward {config}", backward, (x, dy, backward_rows, B, C, D, S, R)


def main():
    """Prints a line per kernel and layout, and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", nargs="*", default=ROWS, choices=sorted(SHAPES))
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=pathlib.Path, default=timing.RESULTS / "ssd_kernels.json")
    options = parser.parse_args()
    results = {}
    for row in options.rows:
        results[row] = {}
        for name, function, arguments in variants(**SHAPES[row]):
            if options.only not in name:
                continue
            try:
                time = timing.milliseconds(jax.jit(function), *arguments, calls=10, repeats=3)
                results[row][name] = time
                print(f"{row:18}{time:8.3f}  {name}", flush=True)
            except Exception as error:  # A layout that does not compile is a result too.
                results[row][name] = str(error)[:300]
                print(f"{row:18}    FAIL  {name}: {str(error)[:300]}", flush=True)
        timing.save(options.out, {"unit": "ms", "rows": results})


if __name__ == "__main__":
    main()
