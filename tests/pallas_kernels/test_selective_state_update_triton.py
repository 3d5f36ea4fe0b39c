# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel of `selective_state_update` on a GPU, against the definition."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import devices, selective_state_update
from pallas_kernels.selective_state_update import triton
from tests.tolerances import BF16_GRAD, BF16_OUT, assert_close, norm_error


def inputs(b=3, h=4, p=24, n=16, g=2, *, per_head=True, slots=None, dtype=jnp.bfloat16):
    """Random arguments; per channel the h heads of p channels are e = h p channels."""
    rng = np.random.default_rng(0)
    channels = (h, p) if per_head else (h * p,)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    return {
        "state": normal(slots or b, *channels, n),
        "x": normal(b, *channels).astype(dtype),
        "dt": normal(b, h).astype(dtype) if per_head else normal(b, h * p).astype(dtype),
        "A": -jnp.exp(normal(h) if per_head else normal(h * p, n)),
        "B": normal(b, g, n).astype(dtype),
        "C": normal(b, g, n).astype(dtype),
        "D": normal(h) if per_head else normal(h * p),
        "z": normal(b, *channels).astype(dtype),
        "dt_bias": normal(h) if per_head else normal(h * p),
    }


def test_refuses_a_cpu():
    assert "GPU" in triton.supports(devices.CPU, {})


@pytest.mark.gpu
@pytest.mark.parametrize("per_head", [True, False])
@pytest.mark.parametrize("slots", [None, 5])
def test_meets_the_definition_on_the_card(per_head, slots):
    pytest.importorskip("jax_triton")
    arrays = inputs(per_head=per_head, slots=slots)
    indices = None if slots is None else jnp.asarray([4, -1, 0], jnp.int32)
    call = functools.partial(selective_state_update, dt_softplus=True, state_indices=indices)

    rng = np.random.default_rng(1)
    dy = jnp.asarray(rng.standard_normal(arrays["x"].shape), jnp.bfloat16)
    dstate = jnp.asarray(rng.standard_normal(arrays["state"].shape), jnp.float32)

    def both(implementation, arrays):
        def run(a):
            return call(**a, implementation=implementation)

        outputs, transpose = jax.vjp(run, arrays)
        (gradients,) = transpose((dy.astype(outputs[0].dtype), dstate))
        return outputs, gradients

    got, got_gradients = both("triton", arrays)
    wide = {name: value.astype(jnp.float32) for name, value in arrays.items()}
    wanted, wanted_gradients = both("reference", wide)
    for name, value, right in zip(("y", "state"), got, wanted, strict=True):
        assert_close(name, value, right, BF16_OUT, norm_error)
    for name, right in wanted_gradients.items():
        assert_close(f"d{name}", got_gradients[name], right, BF16_GRAD, norm_error)
