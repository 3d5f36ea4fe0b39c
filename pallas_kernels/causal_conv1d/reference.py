# SPDX-License-Identifier: Apache-2.0
"""The definition of `causal_conv1d`: one token after another, in float32 (float64 for float64)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import devices


def supports(device: devices.Device, arguments: dict) -> str | None:
    """Runs anywhere."""
    return None


def run(
    x: Float[Array, "b t e"],
    weight: Float[Array, "e w"],
    bias: Float[Array, "e"] | None,
    activation: str | None,
    seq_idx: Int[Array, "b t"] | None,
    initial_state: Float[Array, "b w-1 e"] | Float[Array, "b s w-1 e"] | None,
    num_documents: int | None,
) -> tuple[Float[Array, "b t e"], Float[Array, "b w-1 e"] | Float[Array, "b s w-1 e"]]:
    """See `causal_conv1d`."""
    (b, t, e), w = x.shape, weight.shape[1]
    given = [array for array in (x, weight, bias, initial_state) if array is not None]
    wide = jnp.result_type(jnp.float32, *given)
    documents = jnp.zeros((b, t), jnp.int32) if seq_idx is None else seq_idx
    # Whatever stands in padding, NaN too, reaches neither outputs nor gradients.
    x_real = jnp.where(documents[..., None] >= 0, x.astype(wide), 0)
    states = jnp.zeros((b, num_documents or 1, w - 1, e), wide)
    if initial_state is not None:
        states = initial_state.astype(wide).reshape(states.shape)

    def token(carry, inputs):
        states, last_document = carry
        x, document = inputs
        is_real = document >= 0
        # One state per document: continue that document's. One per row: continue the row's,
        # from zero where a real token's document differs from the last real token's.
        slot = jnp.maximum(document, 0) if num_documents else jnp.zeros_like(document)
        state = jnp.take_along_axis(states, slot[:, None, None, None], axis=1)[:, 0]
        if not num_documents:
            restart = is_real & (last_document >= 0) & (document != last_document)
            state = jnp.where(restart[:, None, None], 0.0, state)
        window = jnp.concatenate([state, x[:, None]], axis=1)
        y = jnp.sum(window * weight.astype(wide).T[None], axis=1)
        y = y if bias is None else y + bias.astype(wide)[None]
        y = jax.nn.silu(y) if activation == "silu" else y
        chosen = is_real[:, None] & (jnp.arange(states.shape[1])[None] == slot[:, None])
        states = jnp.where(chosen[:, :, None, None], window[:, None, 1:], states)
        last_document = jnp.where(is_real, document, last_document)
        return (states, last_document), jnp.where(is_real[:, None], y, 0.0)

    over_time = (jnp.moveaxis(x_real, 1, 0), documents.T)
    carry = (states, jnp.full((b,), -1, documents.dtype))
    (states, _), y = jax.lax.scan(token, carry, over_time)
    return jnp.moveaxis(y, 0, 1).astype(x.dtype), states if num_documents else states[:, 0]
