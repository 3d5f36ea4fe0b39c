# SPDX-License-Identifier: Apache-2.0
"""`mamba3_scan`: what the arguments mean, and their checks; `reference.py` is the definition."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch
from pallas_kernels.mamba3_scan.state import Mamba3State
from pallas_kernels.validation import Arg, check, check_groups, check_positive

OPERATION = dispatch.Operation(
    "mamba3_scan",
    {
        "xla": "pallas_kernels.mamba3_scan.xla",
        "reference": "pallas_kernels.mamba3_scan.reference",
    },
)


def mamba3_scan(
    x: Float[Array, "b t h p"],
    dt: Float[Array, "b t h"],
    log_decay: Float[Array, "b t h"],
    B: Float[Array, "b t r g n"],
    C: Float[Array, "b t r g n"],
    trap: Float[Array, "b t h"],
    angles: Float[Array, "b t 1 a"] | Float[Array, "b t h a"],
    B_bias: Float[Array, "h r n"],
    C_bias: Float[Array, "h r n"],
    D: Float[Array, "h"] | None = None,
    *,
    z: Float[Array, "b t h p"] | None = None,
    mimo_x: Float[Array, "h r p"] | None = None,
    mimo_z: Float[Array, "h r p"] | None = None,
    mimo_o: Float[Array, "h r p"] | None = None,
    norm_weight: Float[Array, "h p"] | None = None,
    norm_eps: float = 1e-5,
    seq_idx: Int[Array, "b t"] | None = None,
    initial_state: Mamba3State | None = None,
    num_documents: int | None = None,
    chunk_size: int | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "b t h p"] | Float[Array, "b t r h p"], Mamba3State]:
    """Runs the Mamba-3 recurrence over a sequence.

    For every head, with its group's B and C, i over ranks and now = sigmoid(trap):

        angle[t] = angle[t-1] + pi * tanh(angles[t]) * dt[t]
        k[t, i]  = rotate(B[t, i] + B_bias[i], angle[t]);   q[t, i] likewise from C
        v[t, i]  = x[t] * mimo_x[i]                         (x[t] without mimo_x)
        u[t, s]  = dt[t] * sum_i outer(v[s, i], k[s, i])
        state[t] = exp(log_decay[t]) * (state[t-1] + (1 - now[t]) * u[t, t-1]) + now[t] * u[t, t]
        y[t, i]  = state[t] @ q[t, i] + D * v[t, i]
        y[t, i]  = y[t, i] / sqrt(mean(y[t, i]**2) + norm_eps) * norm_weight   if norm_weight
        y[t, i]  = y[t, i] * silu(z[t] * mimo_z[i])                            if z
        y[t]     = sum_i mimo_o[i] * y[t, i]                                   if mimo_o

    Rotation turns the first a pairs of channels: (2j, 2j + 1) without mimo_x (SISO), (j, j + n/2)
    with it (MIMO, also of one rank).

    Source: Mamba-3, as in mamba_ssm `mamba3_siso_combined` and `mamba3_mimo`, whose Q, K, V, ADT,
    DT are C, B, x, log_decay, dt here. Documents follow the rules of `packing.py`.

    Axes: b batch, t sequence, h heads, p headdim, r ranks, g groups, n d_state, a rotation angles,
    s documents.

    Args:
      x: (b, t, h, p), float. Input.
      dt: (b, t, h), float. Step size, after bias and softplus: positive; dimensionless.
      log_decay: (b, t, h), float. dt * A, never positive.
      B: (b, t, r, g, n), float, dtype of x. Input map after its norm, before bias and rotation;
        head i reads group i * g // h. r = 1 without mimo_x.
      C: (b, t, r, g, n), float, dtype of x. Output map; as B.
      trap: (b, t, h), float. Before the sigmoid: the share of a token's input that comes at once,
        the rest coming with the next token.
      angles: (b, t, h, a), or (b, t, 1, a) when all heads share them, float. Raw: before tanh and
        dt. Radians per pi and unit step; 2 a <= n.
      B_bias: (h, r, n), float. Added to B.
      C_bias: (h, r, n), float. Added to C.
      D: (h,), float. Skip weight; no skip when omitted.
      z: (b, t, h, p), float, dtype of x. Gate; none when omitted.
      mimo_x: (h, r, p), float. Input weight of each rank; chooses MIMO.
      mimo_z: (h, r, p), float. Gate weight of each rank; 1 when omitted. Needs mimo_x and z.
      mimo_o: (h, r, p), float. Output weight of each rank; ranks stay apart when omitted. Needs
        mimo_x.
      norm_weight: (h, p), float. Weight of an RMS norm over p before the gate; none when omitted.
      norm_eps: Added to the mean square inside that norm.
      seq_idx: (b, t), int. Document of each token; the whole state restarts where it changes, the
        angle and the previous token included. Negative for padding: output 0, state untouched,
        also inside a document. One document when omitted.
      initial_state: `Mamba3State`, float32: state before the first document of each row, whatever
        its id. Each array gets a document axis after b with `num_documents`. Zero when omitted.
      num_documents: s, to carry one state per document instead of one per row: `seq_idx`, then
        needed, takes values 0 ... s-1 (each one run of tokens per row) and chooses the initial
        state. None for one state per row.
      chunk_size: Tokens handled by one matrix product, at least 1; changes speed and rounding,
        never meaning; t need not be a multiple of it. None for the implementation's choice.
      implementation: None for the fastest that supports the call, or a name ("reference", "xla",
        "mosaic"); a named one that cannot run raises.

    Returns:
      y: (b, t, h, p), dtype of x; (b, t, r, h, p) with mimo_x but without mimo_o.
      final_state: `Mamba3State`, float32, with a document axis if the initial state has one: after
        the row's last real token, or after each document. A row of nothing but padding and a
        document that does not occur keep their initial state.

    Raises:
      TypeError: an argument has the wrong kind of dtype, or B, C or z another dtype than x;
        `initial_state` is no `Mamba3State`.
      ValueError: a shape disagrees with the axes above; h is no multiple of g; more than n/2
        angles; r > 1, mimo_z or mimo_o without mimo_x; mimo_z without z; odd n with mimo_x;
        `num_documents` without `seq_idx`; unknown `implementation`.
      NotImplementedError: the named implementation cannot run these arguments; the message gives
        each reason.

    Precision: angles, step sizes, decays, states, norm and gate are float32 (float64 if any array
      is); the operands of products have the dtype of x, with float32 sums; y is rounded once.
      Angles are kept modulo 2 pi.
    Gradients: every float array, through both outputs.
    """
    arrays = {
        "x": x,
        "dt": dt,
        "log_decay": log_decay,
        "B": B,
        "C": C,
        "trap": trap,
        "angles": angles,
        "B_bias": B_bias,
        "C_bias": C_bias,
        "D": D,
        "z": z,
        "mimo_x": mimo_x,
        "mimo_z": mimo_z,
        "mimo_o": mimo_o,
        "norm_weight": norm_weight,
    }
    sizes = check_token_arguments("mamba3_scan", ("b", "t"), arrays)
    check("mamba3_scan", Arg("seq_idx", seq_idx, "b t", "int"), b=sizes["b"], t=sizes["t"])
    check_positive("mamba3_scan", "num_documents", num_documents)
    check_positive("mamba3_scan", "chunk_size", chunk_size)
    if num_documents is not None and seq_idx is None:
        raise ValueError("mamba3_scan: num_documents needs seq_idx to choose the documents")
    if initial_state is not None:
        rows = ("b",) if num_documents is None else ("b", "s")
        sizes |= {} if num_documents is None else {"s": num_documents}
        check_state("mamba3_scan", "initial_state", initial_state, rows, sizes)
    options = {
        "norm_eps": float(norm_eps),
        "seq_idx": seq_idx,
        "initial_state": initial_state,
        "num_documents": num_documents,
        "chunk_size": chunk_size,
    }
    return dispatch.run(OPERATION, as_arrays(arrays | options), implementation)


def check_token_arguments(op: str, batch: tuple[str, ...], arrays: dict[str, Array | None]) -> dict:
    """Checks the arrays that `mamba3_scan` and `mamba3_step` share; returns axis letter → size.

    `batch` holds the leading axes of what differs between tokens; see the two functions' Raises.
    """
    angles = arrays["angles"]
    is_shared = len(getattr(angles, "shape", ())) == len(batch) + 2 and angles.shape[-2] == 1
    token = {
        "x": "h p",
        "dt": "h",
        "log_decay": "h",
        "B": "r g n",
        "C": "r g n",
        "trap": "h",
        "angles": "1 a" if is_shared else "h a",
        "z": "h p",
    }
    parameter = {
        "B_bias": "h r n",
        "C_bias": "h r n",
        "D": "h",
        "mimo_x": "h r p",
        "mimo_z": "h r p",
        "mimo_o": "h r p",
        "norm_weight": "h p",
    }
    axes = {name: " ".join((*batch, axes)) for name, axes in token.items()} | parameter
    kinds = dict.fromkeys(("x", "B", "C", "z"), "activation")
    arguments = (Arg(n, arrays[n], axes[n], kinds.get(n, "float")) for n in arrays)
    sizes = check(op, *arguments, **{"1": 1})
    check_groups(op, "h", sizes["h"], sizes["g"])
    if 2 * sizes["a"] > sizes["n"]:
        raise ValueError(
            f"{op}: angles must have at most n/2 angles a for n={sizes['n']} (from B); "
            f"got a={sizes['a']}"
        )
    if arrays["mimo_x"] is None:
        for name in ("mimo_z", "mimo_o"):
            if arrays[name] is not None:
                raise ValueError(f"{op}: {name} needs mimo_x")
        if sizes["r"] > 1:
            raise ValueError(f"{op}: B must have r=1 ranks without mimo_x; got r={sizes['r']}")
    elif sizes["n"] % 2:
        raise ValueError(f"{op}: n must be even with mimo_x; got n={sizes['n']} (from B)")
    if arrays["mimo_z"] is not None and arrays["z"] is None:
        raise ValueError(f"{op}: mimo_z needs z")
    return sizes


def check_state(
    op: str, name: str, state: Mamba3State, rows: tuple[str, ...], sizes: dict[str, int]
) -> None:
    """Raises unless `state` is a `Mamba3State` whose arrays have the leading axes `rows`.

    A letter of `rows` that `sizes` lacks may be of any one size.
    """
    if not isinstance(state, Mamba3State):
        raise TypeError(f"{op}: {name} must be a Mamba3State; got {type(state).__name__}")
    axes = {"x": "h p", "ssm": "h p n", "B": "r h n", "angle": "h a"}
    arguments = (
        Arg(f"{name}.{field}", getattr(state, field), " ".join((*rows, axes[field])))
        for field in axes
    )
    check(op, *arguments, **{k: v for k, v in sizes.items() if k in (*rows, *"hapnr")})


def as_arrays(arguments: dict) -> dict:
    """The same arguments with every array, also inside a state, a JAX array."""
    return jax.tree.map(lambda v: jnp.asarray(v) if hasattr(v, "shape") else v, arguments)
