# SPDX-License-Identifier: Apache-2.0
"""`causal_conv1d_update`: the arguments' meaning and checks; `reference.py` is the definition."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch
from pallas_kernels.causal_conv1d.checks import canonical_activation
from pallas_kernels.validation import Arg, check

OPERATION = dispatch.Operation(
    "causal_conv1d_update",
    {
        "xla": "pallas_kernels.causal_conv1d_update.xla",
        "reference": "pallas_kernels.causal_conv1d_update.reference",
    },
)


def causal_conv1d_update(
    state: Float[Array, "slots l e"],
    x: Float[Array, "b e"] | Float[Array, "b k e"],
    weight: Float[Array, "e w"],
    bias: Float[Array, "e"] | None = None,
    *,
    activation: str | None = None,
    state_indices: Int[Array, "b"] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "b e"] | Float[Array, "b k e"], Float[Array, "slots l e"]]:
    """Continues `causal_conv1d` by one token, or by k of them, from the inputs before.

    With window = [state, x] along time, for the k tokens of x at the end of it:

        y[t]  = act(bias + sum over j of weight[:, j] * window[t - (w - 1) + j])
        state = the last l rows of window

    Source: as `causal_conv1d`. Mirrors causal_conv1d `causal_conv1d_update` (conv_state_indices =
    state_indices) without its in-place update and circular buffer.

    Axes: b batch, k new tokens, e channels, w taps, l rows of a state; slots = b unless
    `state_indices` chooses among more.

    Args:
      state: (slots, l, e), float, l of at least w-1. Latest inputs, the oldest first; rows before
        the last w-1 are shifted along and have no other effect.
      x: (b, e) or (b, k, e), float. The next token or tokens of each row.
      weight: (e, w), float. Taps, the oldest first.
      bias: (e,), float. Zero when omitted.
      activation: None, or "silu" (also spelled "swish").
      state_indices: (b,), int. Row of `state` for each row of x, each row once, all below slots;
        negative: y is 0 and nothing is updated. Row i for row i when omitted.
      implementation: None for the fastest that supports the call, or "xla" or "reference"; a named
        one that cannot run raises.

    Returns:
      y: shape and dtype of x.
      state: shape and dtype of `state`; the rows of this call's batch are new.

    Raises:
      TypeError: an argument has the wrong kind of dtype.
      ValueError: a shape disagrees with the axes above; l is below w-1; unknown `activation` or
        `implementation`.
      NotImplementedError: the named implementation cannot run these arguments; the message gives
        each reason.

    Precision: everything inside is float32 (float64 if any array is float64); y is rounded once.
    Gradients: every float array, through both outputs.
    """
    op = "causal_conv1d_update"
    sizes = check(
        op,
        Arg("x", x, "b e | b k e"),
        Arg("weight", weight, "e w"),
        Arg("bias", bias, "e"),
        Arg("state_indices", state_indices, "b", "int"),
    )
    _check_state(op, state, sizes, "slots" if state_indices is not None else "b")
    arrays = {
        "state": state,
        "x": x,
        "weight": weight,
        "bias": bias,
        "state_indices": state_indices,
    }
    arguments = {name: None if v is None else jnp.asarray(v) for name, v in arrays.items()}
    arguments["x"] = arguments["x"].reshape(sizes["b"], -1, sizes["e"])
    arguments |= {"activation": canonical_activation(op, activation)}
    y, new_state = dispatch.run(OPERATION, arguments, implementation)
    return y.reshape(x.shape), new_state


def _check_state(op: str, state: Array, sizes: dict[str, int], rows: str) -> None:
    """Checks the state; only its axis l may be empty, when there is one tap."""
    w = sizes["w"]
    shape = tuple(getattr(state, "shape", ()))
    if len(shape) == 3 and shape[1] < w - 1:
        raise ValueError(
            f"{op}: state must have shape ({rows}, l, e) with l of at least w-1={w - 1}; "
            f"got {shape}"
        )
    if len(shape) == 3 and shape[1] == 0:
        wanted = (sizes["b"] if rows == "b" else shape[0], 0, sizes["e"])
        if shape == wanted and jnp.issubdtype(state.dtype, jnp.floating):
            return
    known = {"e": sizes["e"]} | ({"b": sizes["b"]} if rows == "b" else {})
    check(op, Arg("state", state, f"{rows} l e"), **known)
