# SPDX-License-Identifier: Apache-2.0
"""Steps and decays of the SSD kernels, and their gradients: one number per token and head.

XLA makes them, one fusion each way; `mosaic_sums.py` has the sums over time.
"""

import jax.numpy as jnp

from pallas_kernels.ssd import mosaic_sums
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


def decay_gradient(step, decay, sums, interpret=None):
    """Gradients of step and log2 decay from the sums of `mosaic_backward.backward`.

    The gradient of the decay of token k is what passes from tokens before k to k and later ones:
    pairs inside the chunk, whose sums over rows from k on less those over columns from k on; what
    came into the chunk; what leaves it from tokens before k; what passes through it.
    """
    x_u, leaving, arriving = (sums[..., i, :] for i in (X_U, X_R_B, DECAY_ROWS))
    through = jnp.sum(sums[..., S_R_0 : S_R_1 + 1, :], axis=(-2, -1))
    through = through * jnp.exp2(jnp.sum(decay, axis=-1))
    later = arriving - (step * x_u - leaving)
    gradient = mosaic_sums.pair_sums(later, leaving, interpret=interpret)
    return x_u, (gradient + through[..., None]) / LOG2_E
