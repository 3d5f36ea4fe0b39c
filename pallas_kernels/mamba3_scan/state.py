# SPDX-License-Identifier: Apache-2.0
"""What Mamba-3 carries from one token to the next."""

from typing import NamedTuple

from jaxtyping import Array, Float


class Mamba3State(NamedTuple):
    """State of the Mamba-3 recurrence after a token; zeros before the first.

    The trapezoidal rule weighs a token's input twice: when it comes, and again together with the
    next one. So the state holds that token's B and x beside `ssm`, which has its first share only.
    Its size does not depend on how many tokens came.

    Attributes:
      angle: (b, h, a). Rotation angles in radians; compare modulo 2 pi.
      ssm: (b, h, p, n). The recurrence's state.
      B: (b, r, h, n). The last token's input map after bias and rotation, before any step size.
      x: (b, h, p). The last token's input, before mimo_x.
    """

    angle: Float[Array, "b h a"]
    ssm: Float[Array, "b h p n"]
    B: Float[Array, "b r h n"]
    x: Float[Array, "b h p"]
