# SPDX-License-Identifier: Apache-2.0
"""`selective_scan`: what the arguments mean, and their checks; `reference.py` is the definition."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact, Int

from pallas_kernels import dispatch
from pallas_kernels.validation import Arg, check, check_groups, check_positive

OPERATION = dispatch.Operation(
    "selective_scan",
    {
        "mosaic": "pallas_kernels.selective_scan.mosaic",
        "xla": "pallas_kernels.selective_scan.xla",
        # By name only, until its tests have run on a card.
        "triton": "pallas_kernels.selective_scan.triton",
        "reference": "pallas_kernels.selective_scan.reference",
    },
)


def selective_scan(
    x: Float[Array, "b t e"],
    dt: Float[Array, "b t e"],
    A: Inexact[Array, "e n"],
    B: Inexact[Array, "b t n"] | Inexact[Array, "b t g n"] | Inexact[Array, "e n"],
    C: Inexact[Array, "b t n"] | Inexact[Array, "b t g n"] | Inexact[Array, "e n"],
    D: Float[Array, "e"] | None = None,
    *,
    z: Float[Array, "b t e"] | None = None,
    dt_bias: Float[Array, "e"] | None = None,
    dt_softplus: bool = False,
    seq_idx: Int[Array, "b t"] | None = None,
    initial_state: Inexact[Array, "b e n"] | Inexact[Array, "b s e n"] | None = None,
    num_documents: int | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "b t e"], Inexact[Array, "b e n"] | Inexact[Array, "b s e n"]]:
    """Runs the Mamba-1 recurrence (selective scan, S6) over a sequence.

    For every channel, with its group's B and C and step = dt + dt_bias, through softplus if asked:

        state[t] = exp(step[t] * A) * state[t-1] + step[t] * x[t] * B[t]
        y[t]     = sum(state[t] * C[t]) + D * x[t],   then times silu(z[t]) if z is given

    With complex A the state is complex and the sum is 2 * Re(sum(state[t] * C[t])); C is not
    conjugated.

    Source: Gu & Dao 2023, arXiv:2312.00752, section 3.2 and algorithm 2. Mirrors mamba_ssm
    `selective_scan_fn` (u, delta, delta_bias, last_state = x, dt, dt_bias, final_state), with time
    before channels and fixed outputs.

    Axes: b batch, t sequence, e channels (d_inner), g groups, n d_state, s documents.

    Args:
      x: (b, t, e), float. Input after the causal convolution.
      dt: (b, t, e), float. Step size before bias and softplus; dimensionless.
      A: (e, n), float32 or complex64. Decay rate per unit step; its real part is negative.
      B: (b, t, n), (b, t, g, n), or (e, n) when the same for every token; float, or complex if A
        is. Input map; channel i reads group i * g // e.
      C: (b, t, n), (b, t, g, n) or (e, n), chosen independently of B's. Output map, grouped alike.
      D: (e,), float. Skip weight; no skip when omitted.
      z: (b, t, e), float, dtype of x. Gate; none when omitted.
      dt_bias: (e,), float. Added to dt in float32; zero when omitted.
      dt_softplus: Whether the step is softplus(dt + dt_bias) rather than dt + dt_bias.
      seq_idx: (b, t), int. Document of each token; the state restarts where it changes. Negative
        for padding: output 0, state untouched, also inside a document. One document when omitted.
      initial_state: (b, e, n), float32, complex64 for complex A. State before the first document
        of each row, whatever its id. (b, s, e, n) with `num_documents`. Zero when omitted.
      num_documents: s, to carry one state per document instead of one per row: `seq_idx`, then
        needed, takes values 0 ... s-1 (each one run of tokens per row) and chooses the initial
        state. None for one state per row.
      implementation: None for the fastest that supports the call, or "reference" or "xla"; a named
        one that cannot run raises.

    Returns:
      y: (b, t, e), dtype of x.
      final_state: (b, e, n), float32 (complex64). State after the row's last real token; of a row
        of nothing but padding its initial state. With `num_documents` (b, s, e, n): state after
        each document; of one that does not occur its initial state.

    Raises:
      TypeError: an argument has the wrong kind of dtype, e.g. complex B with real A.
      ValueError: a shape disagrees with the axes above; e is no multiple of g; `num_documents`
        without `seq_idx`; unknown `implementation`.
      NotImplementedError: the named implementation cannot run these arguments; the message gives
        each reason.

    Precision: everything inside is float32 (float64 if any array is float64); y is rounded once.
    Gradients: every float and complex array, through both outputs.
    """
    sizes = check(
        "selective_scan",
        Arg("x", x, "b t e", "activation"),
        Arg("dt", dt, "b t e"),
        Arg("A", A, "e n", "inexact"),
        Arg("B", B, "e n | b t n | b t g n", "inexact"),
        Arg("C", C, "e n | b t n | b t g n", "inexact"),
        Arg("D", D, "e"),
        Arg("z", z, "b t e", "activation"),
        Arg("dt_bias", dt_bias, "e"),
        Arg("seq_idx", seq_idx, "b t", "int"),
    )
    check_groups("selective_scan", "e", sizes["e"], sizes.get("g", 1))
    check_positive("selective_scan", "num_documents", num_documents)
    if num_documents is not None and seq_idx is None:
        raise ValueError("selective_scan: num_documents needs seq_idx to choose the documents")
    sizes |= {} if num_documents is None else {"s": num_documents}
    state_axes = "b e n" if num_documents is None else "b s e n"
    check("selective_scan", Arg("initial_state", initial_state, state_axes, "inexact"), **sizes)
    for name, value in (("B", B), ("C", C), ("initial_state", initial_state)):
        _check_real_unless("A", A, name, value)
    arguments = {
        "x": x,
        "dt": dt,
        "A": A,
        "B": _grouped(B, sizes.get("g", 1)),
        "C": _grouped(C, sizes.get("g", 1)),
        "D": D,
        "z": z,
        "dt_bias": dt_bias,
        "dt_softplus": bool(dt_softplus),
        "seq_idx": seq_idx,
        "initial_state": initial_state,
        "num_documents": num_documents,
    }
    arguments = {name: jnp.asarray(v) if _is_array(v) else v for name, v in arguments.items()}
    return dispatch.run(OPERATION, arguments, implementation)


def _grouped(weights: Array, groups: int) -> Array:
    """Returns a per-token B or C as (b, t, g, n); a constant one, (e, n), as it is."""
    if weights.ndim != 3:
        return weights
    b, t, n = weights.shape
    return jnp.broadcast_to(weights[:, :, None], (b, t, groups, n))


def _check_real_unless(owner: str, A: Array, name: str, value: Array | None) -> None:
    """Raises TypeError where a complex argument meets a real A."""
    if value is None or jnp.iscomplexobj(A) or not jnp.iscomplexobj(value):
        return
    raise TypeError(
        f"selective_scan: {name} may be complex only if {owner} is; "
        f"got {name} {value.dtype} with {owner} {A.dtype}"
    )


def _is_array(value: object) -> bool:
    return hasattr(value, "shape")
