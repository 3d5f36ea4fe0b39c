# SPDX-License-Identifier: Apache-2.0
"""Steps and decays of the SSD kernels: small arrays of one number per token and head.

The kernels read them as rows of 64 tokens. XLA makes them; they are 16 bytes a token and head
beside the 256 of x and y.
"""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.ssd.mosaic_backward import DECAY_ROWS, S_R_0, S_R_1, X_R_B, X_U
from pallas_kernels.ssd.mosaic_tiles import Q
from pallas_kernels.ssd.step_size import step_size

LOG2_E = 1.4426950408889634
# 2^-160 is 0 in float32, and 64 such tokens still leave a sum with 10 bits behind the point, so
# that a chunk may forget everything at each of its tokens and differences stay good to 5e-4.
FORGETS = -160.0


def steps_and_decays(dt, A, dt_bias, dt_softplus, dt_limit, is_real, starts):
    """Returns step (b, t, h) and log2 decay (b, t, h), both fp32.

    A token of `starts` forgets everything before it; padding has step 0 and no decay.
    """
    step = step_size(dt, dt_bias, dt_softplus, dt_limit, is_real, jnp.float32)
    decay = step * (A.astype(jnp.float32) * LOG2_E)[None, None]
    decay = jnp.where(decay < FORGETS, FORGETS, decay)
    return step, decay if starts is None else jnp.where(starts[..., None], FORGETS, decay)


def chunked(values):
    """(b, t, h) to (b, c, h, 64)."""
    b, t, h = values.shape
    return values.reshape(b, t // Q, Q, h).swapaxes(2, 3)


def cumulative(decay):
    """(b, c, h, 64) log2 decays to their sums through each token, by one product."""
    upper = jnp.asarray(np.tri(Q, dtype=np.float32).T)
    return jnp.matmul(decay, upper, precision=jax.lax.Precision.HIGHEST)


def forward_rows(step, total):
    """What the forward kernel reads, (b, c, h, 4, 64).

    With p the cumulative log2 decays: p; p - log2(step); 2^p; step * 2^(p_last - p).
    """
    last = total[..., -1:]
    rows = (total, total - jnp.log2(step), jnp.exp2(total), step * jnp.exp2(last - total))
    return jnp.stack(rows, axis=3)


def backward_rows(step, total):
    """What the backward kernel reads, (b, c, h, 4, 64).

    With p the cumulative log2 decays: p; step; 2^p; 2^(p_last - p).
    """
    rows = (total, step, jnp.exp2(total), jnp.exp2(total[..., -1:] - total))
    return jnp.stack(rows, axis=3)


def decay_gradient(step, decay, sums):
    """Gradients of step and log2 decay from the sums of `mosaic_backward.backward`.

    The gradient of the decay of token k is what passes from tokens before k to k and later ones:
    pairs inside the chunk, whose sums over rows from k on less those over columns from k on; what
    came into the chunk; what leaves it from tokens before k; what passes through it.
    """
    x_u, leaving, arriving = (sums[..., i, :] for i in (X_U, X_R_B, DECAY_ROWS))
    through = jnp.sum(sums[..., S_R_0 : S_R_1 + 1, :], axis=(-2, -1))
    through = through * jnp.exp2(jnp.sum(decay, axis=-1))
    later = arriving - (step * x_u - leaving)
    lower = np.tri(Q, dtype=np.float32)
    pairs = jnp.concatenate([later, leaving], axis=-1)
    # At k: the sum of `later` from k on, and of `leaving` before k.
    matrix = jnp.asarray(np.concatenate([lower, np.triu(np.ones((Q, Q), np.float32), 1)]))
    gradient = jnp.matmul(pairs, matrix, precision=jax.lax.Precision.HIGHEST)
    return x_u, (gradient + through[..., None]) / LOG2_E
