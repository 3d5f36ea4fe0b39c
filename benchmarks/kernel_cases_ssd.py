# SPDX-License-Identifier: Apache-2.0
"""The configurations of the SSD kernels that `kernels_check` compiles."""

import functools

import jax.numpy as jnp

from benchmarks.kernel_case import Case
from pallas_kernels.ssd import mosaic_backward, mosaic_forward, mosaic_states, mosaic_sums

F32, BF16 = jnp.float32, jnp.bfloat16
B, T, H, G = 2, 1024, 8, 2


def cases() -> list[Case]:
    """Every layout that `mosaic_config` can choose, with and without the options."""
    return [*_forward_cases(), *_states_cases(), *_backward_cases(), *_sums_cases()]


def _forward_cases():
    def run(config, ungated, x, rows, B, C, D, z, initial):
        return mosaic_forward.forward(x, rows, B, C, D, z, initial, config, ungated=ungated)

    two = mosaic_forward.Config()
    three = mosaic_forward.Config(heads=3, producer=False, together=False)
    layouts = [
        (two, 128, False, False, 0),
        (two, 64, False, False, 0),
        (mosaic_forward.Config(segments=4), 128, True, True, 64),
        (three, 128, False, False, 256),
        (three, 64, False, True, 0),
    ]
    for config, n, gate, initial, spills in layouts:
        states = (B, config.segments, H, 64, n)
        arguments = (
            *_sequence(n),
            ((H, 64), F32),
            ((B, T, H, 64), BF16) if gate else None,
            (states, F32) if initial else None,
        )
        name = f"ssd forward n={n} gate={gate} initial={initial} {config}"
        yield Case(name, functools.partial(run, config, gate), arguments, spills)


def _states_cases():
    def run(config, options, values, rows, maps, initial):
        return mosaic_states.states(values, rows, maps, initial, config, **options)

    for n in (64, 128):
        for backwards, store, gradient_rows in (
            (False, False, False),
            (False, True, True),
            (True, True, True),
        ):
            config = mosaic_states.Config(segments=4)
            options = {"backwards": backwards, "store": store, "gradient_rows": gradient_rows}
            values, rows, maps, _ = _sequence(n)
            arguments = (values, rows, maps, ((B, config.segments, H, 64, n), F32))
            name = f"ssd states n={n} {options}"
            yield Case(name, functools.partial(run, config, options), arguments)


def _backward_cases():
    def run(config, *arrays):
        return mosaic_backward.backward(*arrays, config)

    for n, skip, splits in ((128, True, 1), (64, False, 2)):
        config = mosaic_backward.Config(splits=splits)
        x, rows, maps, _ = _sequence(n)
        states = ((B, T // 64, H, 64, n), BF16)
        D = ((H, 64), F32) if skip else None
        arguments = (x, x, rows, maps, maps, D, states, states)
        yield Case(f"ssd backward n={n} {config}", functools.partial(run, config), arguments, 64)


def _sums_cases():
    values = ((B, T // 64, H, 64), F32)
    for when in (False, True):
        run = functools.partial(mosaic_sums.decay_rows, for_backward=when)
        yield Case(f"ssd rows for_backward={when}", run, (values, values))
    yield Case("ssd pair sums", mosaic_sums.pair_sums, (values, values))


def _sequence(n):
    """x, rows, B and C of the kernels."""
    maps = ((B, T, G, n), BF16)
    return ((B, T, H, 64), BF16), ((B, T // 64, H, 4, 64), F32), maps, maps
