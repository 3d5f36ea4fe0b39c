# SPDX-License-Identifier: Apache-2.0
"""Inputs of the `ssd` tests, and one call that gives every output and every gradient."""

import contextlib
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import devices, ssd
from tests.golden import fill
from tests.tolerances import assert_close, norm_error

IMPLEMENTATIONS = ("reference", "xla")


def filled(b: int, t: int, h=4, p=3, g=2, n=5, *, z=True, state=True) -> dict[str, np.ndarray]:
    """The inputs of the specification's G3, for any length."""
    arrays = {
        "x": fill((b, t, h, p), 1),
        "dt": fill((b, t, h), 2),
        "A": -np.exp(fill((h,), 3)),
        "B": fill((b, t, g, n), 4),
        "C": fill((b, t, g, n), 5),
        "D": fill((h,), 6),
        "dt_bias": fill((h,), 8),
    }
    if z:
        arrays["z"] = fill((b, t, h, p), 7)
    if state:
        arrays["initial_state"] = fill((b, h, p, n), 9)
    return arrays


def random(seed: int, b: int, t: int, h=4, p=3, g=2, n=5, *, z=True, D="h") -> dict:
    """Random inputs with the decays of a trained model's range."""
    r = np.random.default_rng(seed)

    def normal(*shape):
        return r.normal(size=shape).astype(np.float32)

    arrays = {
        "x": normal(b, t, h, p),
        "dt": normal(b, t, h) - 2,
        "A": -np.exp(r.uniform(0, 2.8, h)).astype(np.float32),
        "B": normal(b, t, g, n),
        "C": normal(b, t, g, n),
        "D": {"h": normal(h), "hp": normal(h, p), None: None}[D],
        "dt_bias": normal(h),
        "z": normal(b, t, h, p) if z else None,
        "initial_state": normal(b, h, p, n),
    }
    return {name: value for name, value in arrays.items() if value is not None}


def part(arrays: dict, rows: slice, tokens: slice) -> dict:
    """The arrays of some rows and tokens."""
    cut = dict(arrays)
    for name in ("x", "dt", "B", "C", "z"):
        if name in arrays:
            cut[name] = arrays[name][rows, tokens]
    if "initial_state" in arrays:
        cut["initial_state"] = arrays["initial_state"][rows]
    return cut


@functools.partial(
    jax.jit,
    static_argnames=(
        "implementation",
        "chunk_size",
        "num_documents",
        "dt_limit",
        "dt_softplus",
        "for_gpu",
    ),
)
def outputs_and_gradients(
    arrays,
    cotangents=None,
    seq_idx=None,
    *,
    implementation,
    chunk_size=None,
    num_documents=None,
    dt_limit=(0.0, math.inf),
    dt_softplus=True,
    for_gpu=False,
):
    """Returns {"y", "final_state"} and the gradient of sum(cotangent * output) by name.

    Without cotangents they are fill(shape, 11) and fill(shape, 12). `for_gpu` takes the sizes that
    the implementation takes for a GPU.
    """

    def loss(arrays):
        assumed = devices.assume(devices.H200) if for_gpu else contextlib.nullcontext()
        with assumed:
            y, final_state = ssd(
                **arrays,
                seq_idx=seq_idx,
                dt_softplus=dt_softplus,
                dt_limit=dt_limit,
                num_documents=num_documents,
                chunk_size=chunk_size,
                implementation=implementation,
            )
        outputs = {"y": y, "final_state": final_state}
        weights = cotangents or {
            "y": jnp.asarray(fill(y.shape, 11)),
            "final_state": jnp.asarray(fill(final_state.shape, 12)),
        }
        total = sum(jnp.sum(weights[name] * outputs[name]) for name in weights)
        return total, outputs

    (_, outputs), gradients = jax.value_and_grad(loss, has_aux=True)(arrays)
    return outputs, gradients


def assert_same(got, wanted, out_tolerance, grad_tolerance, measure=norm_error):
    """Compares outputs and gradients, as `outputs_and_gradients` returns them, by name."""
    for kind, tolerance in ((0, out_tolerance), (1, grad_tolerance)):
        assert got[kind].keys() == wanted[kind].keys()
        for name, value in wanted[kind].items():
            label = ("", "gradient of ")[kind] + name
            assert_close(label, got[kind][name], value, tolerance, measure)
