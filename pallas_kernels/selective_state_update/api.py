# SPDX-License-Identifier: Apache-2.0
"""`selective_state_update`: the arguments' meaning and checks; `reference.py` is the definition.

The implementations see one form only, heads of channels: a call per channel with g groups is one
with g heads of e/g channels each. Parameters shared by the channels of a head have axes of size 1.
"""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact, Int

from pallas_kernels import dispatch
from pallas_kernels.validation import Arg, check, check_groups

OPERATION = dispatch.Operation(
    "selective_state_update",
    {
        "xla": "pallas_kernels.selective_state_update.xla",
        "triton": "pallas_kernels.selective_state_update.triton",
        "reference": "pallas_kernels.selective_state_update.reference",
    },
)


def selective_state_update(
    state: Inexact[Array, "slots e n"] | Inexact[Array, "slots h p n"],
    x: Float[Array, "b e"] | Float[Array, "b h p"],
    dt: Float[Array, "b e"] | Float[Array, "b h"] | Float[Array, "b h p"],
    A: Inexact[Array, "e n"] | Inexact[Array, "h"] | Inexact[Array, "h p n"],
    B: Inexact[Array, "b n"] | Inexact[Array, "b g n"],
    C: Inexact[Array, "b n"] | Inexact[Array, "b g n"],
    D: Float[Array, "e"] | Float[Array, "h"] | Float[Array, "h p"] | None = None,
    *,
    z: Float[Array, "b e"] | Float[Array, "b h p"] | None = None,
    dt_bias: Float[Array, "e"] | Float[Array, "h"] | Float[Array, "h p"] | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    state_indices: Int[Array, "b"] | None = None,
    implementation: str | None = None,
) -> tuple[
    Float[Array, "b e"] | Float[Array, "b h p"],
    Inexact[Array, "slots e n"] | Inexact[Array, "slots h p n"],
]:
    """Advances the Mamba-1 or Mamba-2 recurrence by one token.

    For every channel, with its group's B and C and step = clip(softplus(dt + dt_bias), *dt_limit):

        new = exp(step * A) * state + step * x * B
        y   = sum(new * C) + D * x,   then times silu(z) if z is given

    The form follows the rank of x. Per channel (Mamba-1) it is one step of `selective_scan`; per
    head (Mamba-2) one step of `ssd`. With complex A, y = 2 * Re(sum(new * C)) + D * x.

    Source: Gu & Dao 2023, arXiv:2312.00752, and Dao & Gu 2024, arXiv:2405.21060. Mirrors mamba_ssm
    `selective_state_update` (state_batch_indices = state_indices), without its in-place update.

    Axes: b batch, e channels (d_inner), h heads, p headdim, g groups, n d_state; slots = b unless
    `state_indices` chooses among more.

    Args:
      state: (slots, e, n) or (slots, h, p, n), float of any width (complex64 for complex A).
      x: (b, e) or (b, h, p), float. One token's input after the causal convolution.
      dt: (b, e); per head (b, h) or (b, h, p), float. Step size before bias, softplus and limit;
        dimensionless.
      A: (e, n); per head (h,) or (h, p, n), float32 or complex64. Decay rate per unit step; its
        real part is negative.
      B: (b, n) or (b, g, n); per head (b, g, n), float, or complex if A is. Input map; channel i
        of e reads group i * g // e, head i of h group i * g // h.
      C: (b, n) or (b, g, n); per head (b, g, n); dtypes and grouping as B. Output map.
      D: (e,); per head (h,) or (h, p), float. Skip weight; no skip when omitted.
      z: (b, e) or (b, h, p), shape and dtype of x. Gate; none when omitted.
      dt_bias: (e,); per head (h,) or (h, p), float. Added to dt in float32; zero when omitted.
      dt_softplus: Whether the step is softplus(dt + dt_bias) rather than dt + dt_bias.
      dt_limit: Smallest and largest step, dimensionless. The default sets no bound per channel,
        where `selective_scan` has none either; per head it stops negative steps, as in `ssd`.
      state_indices: (b,), int. Row of `state` for each token, each row once, all below slots;
        negative: y is 0 and nothing is updated. Row i for token i when omitted.
      implementation: None for the fastest that supports the call, or "reference" or "xla"; a named
        one that cannot run raises.

    Returns:
      y: shape and dtype of x.
      state: shape and dtype of `state`; the rows of this token's batch are new.

    Raises:
      TypeError: an argument has the wrong kind of dtype, e.g. complex B with real A.
      ValueError: a shape disagrees with the axes above; e or h is no multiple of g; dt_limit is
        no pair lower <= upper; unknown `implementation`.
      NotImplementedError: the named implementation cannot run these arguments; the message gives
        each reason.

    Precision: everything inside is float32 (float64 if any array is float64); y comes from the
    new state before that is rounded to the dtype of `state`.
    Gradients: every float and complex array, through both outputs.
    """
    per_head = getattr(x, "ndim", None) == 3
    sizes = _check(per_head, state, x, dt, A, B, C, D, z, dt_bias, state_indices)
    h = sizes["h"] if per_head else sizes.get("g", 1)
    p = sizes["p"] if per_head else sizes["e"] // h
    b, n = sizes["b"], sizes["n"]
    groups = sizes.get("g", 1)
    low, high = _limit(dt_limit)
    arguments = {
        "state": state.reshape(-1, h, p, n),
        "x": x.reshape(b, h, p),
        "dt": dt.reshape(b, h, -1),
        "A": A[:, None, None] if A.ndim == 1 else A.reshape(h, p, n),
        "B": _grouped(B, groups),
        "C": _grouped(C, groups),
        "D": None if D is None else D.reshape(h, -1),
        "z": None if z is None else z.reshape(b, h, p),
        "dt_bias": None if dt_bias is None else dt_bias.reshape(h, -1),
        "dt_softplus": bool(dt_softplus),
        "dt_limit": (low, high) if per_head or low > 0 else (-math.inf, high),
        "state_indices": state_indices,
    }
    arguments = {name: jnp.asarray(v) if _is_array(v) else v for name, v in arguments.items()}
    y, new_state = dispatch.run(OPERATION, arguments, implementation)
    return y.reshape(x.shape), new_state.reshape(state.shape)


def _check(per_head: bool, state, x, dt, A, B, C, D, z, dt_bias, state_indices) -> dict[str, int]:
    op = "selective_state_update"
    sizes = check(
        op,
        Arg("x", x, "b h p" if per_head else "b e", "activation"),
        Arg("dt", dt, "b h | b h p" if per_head else "b e"),
        Arg("A", A, "h | h p n" if per_head else "e n", "inexact"),
        Arg("B", B, "b g n" if per_head else "b n | b g n", "inexact"),
        Arg("C", C, "b g n" if per_head else "b n | b g n", "inexact"),
        Arg("D", D, "h | h p" if per_head else "e"),
        Arg("z", z, "b h p" if per_head else "b e", "activation"),
        Arg("dt_bias", dt_bias, "h | h p" if per_head else "e"),
        Arg("state_indices", state_indices, "b", "int"),
    )
    rows = {"b": sizes["b"]} if state_indices is None else {}
    first = "b" if state_indices is None else "slots"
    channels = {axis: sizes[axis] for axis in ("h", "p", "e", "n") if axis in sizes}
    axes = f"{first} h p n" if per_head else f"{first} e n"
    check(op, Arg("state", state, axes, "inexact"), **rows, **channels)
    counted = "h" if per_head else "e"
    check_groups(op, counted, sizes[counted], sizes.get("g", 1))
    for name, value in (("B", B), ("C", C), ("state", state)):
        if jnp.iscomplexobj(value) and not jnp.iscomplexobj(A):
            raise TypeError(
                f"{op}: {name} may be complex only if A is; got {name} {value.dtype} "
                f"with A {A.dtype}"
            )
    if jnp.iscomplexobj(A) and not jnp.iscomplexobj(state):
        raise TypeError(f"{op}: state must be complex where A is; got {state.dtype}")
    return sizes


def _limit(dt_limit: tuple[float, float]) -> tuple[float, float]:
    try:
        low, high = (float(bound) for bound in dt_limit)
    except (TypeError, ValueError):
        low, high = math.nan, math.nan
    if not low <= high:
        raise ValueError(
            "selective_state_update: dt_limit must be a pair (lower, upper) with lower <= upper; "
            f"got {dt_limit!r}"
        )
    return low, high


def _grouped(weights: Array, groups: int) -> Array:
    """Returns B or C as (b, g, n), one without a group axis shared by all groups."""
    if weights.ndim == 3:
        return weights
    b, n = weights.shape
    return jnp.broadcast_to(weights[:, None], (b, groups, n))


def _is_array(value: object) -> bool:
    return hasattr(value, "shape")
