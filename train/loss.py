# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy of the next token, in fp32, without the logits of a whole sequence in memory.

The head's product, its softmax and its gradient are computed for a few tokens of every row at a
time; the gradients are formed in the forward pass, where the logits are, so the product is done
three times (once forward, twice backward) and never repeated.
"""

import jax
import jax.numpy as jnp

from mamba_jax.array_types import Array, Bool, Float, Int


def next_token_nats(
    hidden: Float[Array, "b t d"],
    kernel: Float[Array, "d v"],
    targets: Int[Array, "b t"],
    mask: Bool[Array, "b t"],
    chunk: int,
) -> Float[Array, ""]:
    """Sums -log p(target) over the tokens of `mask`, in nats.

    Args:
      hidden: (b, t, d), compute dtype. What the head reads.
      kernel: (d, v), fp32. The head's weights; products are in the dtype of `hidden` and are summed
        in fp32.
      targets: (b, t), int32. The next tokens.
      mask: (b, t), bool. Which of them count.
      chunk: Tokens of each row whose logits exist together; changes memory, not meaning.

    Returns:
      The sum, fp32.

    Gradients: hidden and kernel, once.
    """
    batch, time, _ = hidden.shape
    chunk = min(chunk, time)
    count = -(-time // chunk)
    padding = ((0, 0), (0, count * chunk - time))
    hidden = jnp.pad(hidden, (*padding, (0, 0)))
    targets, mask = jnp.pad(targets, padding), jnp.pad(mask, padding)

    def pieces(array):
        # Piece c has tokens c, c + count, …: every device of a sequence axis has some of each.
        return jnp.moveaxis(array.reshape(batch, chunk, count, *array.shape[2:]), 2, 0)

    return _nats(pieces(hidden), kernel, pieces(targets), pieces(mask))


@jax.custom_vjp
def _nats(hidden_cbqd, kernel, targets_cbq, mask_cbq):
    def body(total, piece):
        return total + _chunk_nats(kernel, *piece)[0], None

    total, _ = jax.lax.scan(body, jnp.float32(0), (hidden_cbqd, targets_cbq, mask_cbq))
    return total


def _nats_forward(hidden_cbqd, kernel, targets_cbq, mask_cbq):
    def body(carry, piece):
        total, dkernel = carry
        hidden, _, mask = piece
        nats, logits, log_norm, is_target = _chunk_nats(kernel, *piece)
        dlogits = jnp.where(mask[..., None], jnp.exp(logits - log_norm) - is_target, 0)
        dlogits = dlogits.astype(hidden.dtype)
        dhidden = _dot("bqv,dv->bqd", dlogits, kernel.astype(hidden.dtype)).astype(hidden.dtype)
        return (total + nats, dkernel + _dot("bqd,bqv->dv", hidden, dlogits)), dhidden

    start = jnp.float32(0), jnp.zeros(kernel.shape, jnp.float32)
    pieces = hidden_cbqd, targets_cbq, mask_cbq
    (total, dkernel), dhidden = jax.lax.scan(body, start, pieces)
    return total, (dhidden, dkernel)


def _nats_backward(saved, dtotal):
    dhidden, dkernel = saved
    return (dhidden * dtotal.astype(dhidden.dtype), dkernel * dtotal, None, None)


def _chunk_nats(kernel, hidden, targets, mask):
    """Nats of one chunk, and the fp32 logits, log normaliser and targets its gradient needs."""
    logits = _dot("bqd,dv->bqv", hidden, kernel.astype(hidden.dtype))
    log_norm = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    is_target = targets[..., None] == jnp.arange(kernel.shape[1])[None, None, :]
    picked = jnp.sum(jnp.where(is_target, logits, 0), axis=-1)
    nats = jnp.sum(jnp.where(mask, log_norm[..., 0] - picked, 0))
    return nats, logits, log_norm, is_target


def _dot(subscripts: str, a: Array, b: Array) -> Array:
    """A product summed and returned in fp32."""

    def product(a, b):
        return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)

    def widened(a, b):
        # XLA's CPU backend has no bf16 × bf16 → fp32 product for every shape (jax 0.12.0).
        return product(a.astype(jnp.float32), b.astype(jnp.float32))

    return jax.lax.platform_dependent(a, b, cpu=widened, default=product)


_nats.defvjp(_nats_forward, _nats_backward)
