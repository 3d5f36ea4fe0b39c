# SPDX-License-Identifier: Apache-2.0
"""`ssd`: what the arguments mean, and their checks; `reference.py` is the definition."""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch
from pallas_kernels.validation import Arg, check, check_groups, check_positive

OPERATION = dispatch.Operation(
    "ssd",
    {
        "mosaic": "pallas_kernels.ssd.mosaic",
        "xla": "pallas_kernels.ssd.xla",
        "reference": "pallas_kernels.ssd.reference",
    },
)


def ssd(
    x: Float[Array, "b t h p"],
    dt: Float[Array, "b t h"],
    A: Float[Array, "h"],
    B: Float[Array, "b t g n"],
    C: Float[Array, "b t g n"],
    D: Float[Array, "h"] | Float[Array, "h p"] | None = None,
    *,
    z: Float[Array, "b t h p"] | None = None,
    dt_bias: Float[Array, "h"] | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    seq_idx: Int[Array, "b t"] | None = None,
    initial_state: Float[Array, "b h p n"] | Float[Array, "b s h p n"] | None = None,
    num_documents: int | None = None,
    chunk_size: int | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "b t h p"], Float[Array, "b h p n"] | Float[Array, "b s h p n"]]:
    """Runs the Mamba-2 recurrence (state-space duality) over a sequence.

    For every head, with its group's B and C and step = clip(softplus(dt + dt_bias), *dt_limit), the
    softplus only if asked:

        state[t] = exp(step[t] * A) * state[t-1] + step[t] * outer(x[t], B[t])
        y[t]     = state[t] @ C[t] + D * x[t],   then times silu(z[t]) if z is given

    Source: Dao & Gu 2024, arXiv:2405.21060, section 6 and listing 1. Mirrors mamba_ssm
    `mamba_chunk_scan_combined` (initial_states, final_states = initial_state, final_state), with
    fixed outputs and the rules of `packing.py` for documents.

    Axes: b batch, t sequence, h heads, p headdim, g groups, n d_state, s documents.

    Args:
      x: (b, t, h, p), float. Input after the causal convolution.
      dt: (b, t, h), float. Step size before bias, softplus and limits; dimensionless.
      A: (h,), float32. Decay rate per unit step; negative.
      B: (b, t, g, n), float, dtype of x. Input map; head i reads group i * g // h.
      C: (b, t, g, n), float, dtype of x. Output map; grouping as B.
      D: (h,) or (h, p), float. Skip weight; no skip when omitted.
      z: (b, t, h, p), float, dtype of x. Gate; none when omitted.
      dt_bias: (h,), float. Added to dt in float32; zero when omitted.
      dt_softplus: Whether the step is softplus(dt + dt_bias) rather than dt + dt_bias.
      dt_limit: (lowest, highest) step, 0 <= lowest <= highest; clips last, also without softplus,
        and stops the gradient of a step beyond it. Dimensionless.
      seq_idx: (b, t), int. Document of each token; the state restarts where it changes. Negative
        for padding: output 0, state untouched, also inside a document. One document when omitted.
      initial_state: (b, h, p, n), float32. State before the first document of each row, whatever
        its id. (b, s, h, p, n) with `num_documents`. Zero when omitted.
      num_documents: s, to carry one state per document instead of one per row: `seq_idx`, then
        needed, takes values 0 ... s-1 (each one run of tokens per row) and chooses the initial
        state. None for one state per row.
      chunk_size: Tokens handled by one matrix product, at least 1; changes speed and rounding,
        never meaning; t need not be a multiple of it. None for the implementation's choice.
      implementation: None for the fastest that supports the call, or a name ("reference", "xla",
        "mosaic"); a named one that cannot run raises.

    Returns:
      y: (b, t, h, p), dtype of x.
      final_state: (b, h, p, n), float32. State after the row's last real token; of a row of nothing
        but padding its initial state. With `num_documents` (b, s, h, p, n): state after each
        document; of one that does not occur its initial state.

    Raises:
      TypeError: an argument has the wrong kind of dtype, or B, C or z another dtype than x.
      ValueError: a shape disagrees with the axes above; h is no multiple of g; `dt_limit` is no
        range of steps; `num_documents` without `seq_idx`; unknown `implementation`.
      NotImplementedError: the named implementation cannot run these arguments; the message gives
        each reason.

    Precision: steps, log decays, their sums and states are float32 (float64 if any array is); the
      operands of products have the dtype of x, with float32 sums; y is rounded once.
    Gradients: every float array, through both outputs.
    """
    sizes = check(
        "ssd",
        Arg("x", x, "b t h p", "activation"),
        Arg("dt", dt, "b t h"),
        Arg("A", A, "h"),
        Arg("B", B, "b t g n", "activation"),
        Arg("C", C, "b t g n", "activation"),
        Arg("D", D, "h | h p"),
        Arg("z", z, "b t h p", "activation"),
        Arg("dt_bias", dt_bias, "h"),
        Arg("seq_idx", seq_idx, "b t", "int"),
    )
    check_groups("ssd", "h", sizes["h"], sizes["g"])
    check_positive("ssd", "num_documents", num_documents)
    check_positive("ssd", "chunk_size", chunk_size)
    if num_documents is not None and seq_idx is None:
        raise ValueError("ssd: num_documents needs seq_idx to choose the documents")
    sizes |= {} if num_documents is None else {"s": num_documents}
    state_axes = "b h p n" if num_documents is None else "b s h p n"
    check("ssd", Arg("initial_state", initial_state, state_axes), **sizes)
    arguments = {
        "x": x,
        "dt": dt,
        "A": A,
        "B": B,
        "C": C,
        "D": D,
        "z": z,
        "dt_bias": dt_bias,
        "dt_softplus": bool(dt_softplus),
        "dt_limit": _checked_limit(dt_limit),
        "seq_idx": seq_idx,
        "initial_state": initial_state,
        "num_documents": num_documents,
        "chunk_size": chunk_size,
    }
    arguments = {name: jnp.asarray(v) if _is_array(v) else v for name, v in arguments.items()}
    return dispatch.run(OPERATION, arguments, implementation)


def _checked_limit(dt_limit: tuple[float, float]) -> tuple[float, float]:
    """Returns `dt_limit` as two floats; raises unless it is a range of steps."""
    try:
        lowest, highest = (float(limit) for limit in dt_limit)
    except (TypeError, ValueError) as error:
        raise TypeError(f"ssd: dt_limit must be two numbers; got {dt_limit!r}") from error
    if not 0 <= lowest <= highest:
        raise ValueError(f"ssd: dt_limit must be 0 <= lowest <= highest; got {dt_limit!r}")
    return lowest, highest


def _is_array(value: object) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")
