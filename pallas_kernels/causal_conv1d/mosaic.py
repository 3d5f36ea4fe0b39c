# SPDX-License-Identifier: Apache-2.0
"""`causal_conv1d` on Hopper: what the kernels of `mosaic_kernels.py` serve, and gradients."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import devices
from pallas_kernels.causal_conv1d import mosaic_kernels as kernels
from pallas_kernels.causal_conv1d import xla


def supports(device: devices.Device, arguments: dict) -> str | None:
    """Returns None if the kernels can run this call, else why they cannot."""
    if (reason := devices.mosaic_refusal(device)) is not None:
        return reason
    if arguments["seq_idx"] is not None:
        return "seq_idx: the kernels' taps do not stop at documents"
    for name in ("x", "weight", "bias", "initial_state"):
        value = arguments[name]
        if value is not None and value.dtype not in (jnp.bfloat16, jnp.float32):
            return f"{name} is {value.dtype}; the kernels take bfloat16 and float32"
    (_, t, e), w = arguments["x"].shape, arguments["weight"].shape[1]
    if not 2 <= w <= 4:
        return f"w={w} taps; the kernels have 2 to 4"
    if t % kernels.TILE:
        return f"t={t} is not a multiple of {kernels.TILE}"
    if e % kernels.LANES:
        return f"e={e} is not a multiple of {kernels.LANES}"
    return None


def run(
    x: Float[Array, "b t e"],
    weight: Float[Array, "e w"],
    bias: Float[Array, "e"] | None,
    activation: str | None,
    seq_idx: Int[Array, "b t"] | None,
    initial_state: Float[Array, "b w-1 e"] | None,
    num_documents: int | None,
    interpret=None,
) -> tuple[Float[Array, "b t e"], Float[Array, "b w-1 e"]]:
    """See `causal_conv1d`. `interpret`: parameters of Pallas' GPU interpreter, for tests."""
    del seq_idx, num_documents
    y = _convolve((activation, interpret), x, weight, bias, initial_state)
    # t is at least a tile, which is more than w-1.
    return y, x[:, x.shape[1] - (weight.shape[1] - 1) :]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _convolve(options, x, weight, bias, state):
    plan, taps = _plan(options, x, weight, state), _taps(weight, bias)
    return kernels.forward(x, taps, _wide(state), plan, interpret=options[1])


def _forward(options, x, weight, bias, state):
    return _convolve(options, x, weight, bias, state), (x, weight, bias, state)


def _backward(options, saved, dy):
    x, weight, bias, state = saved
    plan, taps = _plan(options, x, weight, state), _taps(weight, bias)
    dx, dtaps = kernels.backward(x, dy, taps, _wide(state), plan, interpret=options[1])
    dtaps = jnp.sum(dtaps, axis=(0, 1))
    dstate = None
    if state is not None:
        # Only the first w-1 tokens read the state.
        few = plan.w - 1

        def start(state):
            return xla.run(x[:, :few], weight, bias, options[0], None, state, None)[0]

        (dstate,) = jax.vjp(start, state)[1](dy[:, :few])
    dweight = dtaps[: plan.w].T.astype(weight.dtype)
    return dx, dweight, None if bias is None else dtaps[plan.w].astype(bias.dtype), dstate


_convolve.defvjp(_forward, _backward)


def _plan(options, x, weight, state) -> kernels.Plan:
    return kernels.Plan(
        *x.shape,
        w=weight.shape[1],
        silu=options[0] == "silu",
        has_state=state is not None,
        rough=x.dtype == jnp.bfloat16,
    )


def _taps(weight, bias) -> Float[Array, "w+1 e"]:
    """Taps before channels, then the bias: what a block of channels reads, in float32."""
    bias = jnp.zeros(weight.shape[:1]) if bias is None else bias
    return jnp.concatenate([weight.T, bias[None]]).astype(jnp.float32)


def _wide(state):
    return None if state is None else state.astype(jnp.float32)
