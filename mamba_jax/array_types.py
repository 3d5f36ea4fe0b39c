# SPDX-License-Identifier: Apache-2.0
"""The axis letters of every signature in this package, and the array types written with them.

b batch            d d_model                     v vocabulary (padded)
t time (token)     e d_inner = expand · d_model  k dt_rank (Mamba-1)
h heads            p headdim                     r MIMO rank (Mamba-3)
g groups           n d_state                     a rotary angles (Mamba-3)
w conv width       l max_length of an attention cache
"""

from jax import Array
from jaxtyping import Bool, Float, Int

__all__ = ["Array", "Bool", "Float", "Int"]
