# SPDX-License-Identifier: Apache-2.0
"""`mamba3_step`: what the arguments mean, and their checks; `reference.py` is the definition."""

from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch
from pallas_kernels.mamba3_scan.api import as_arrays, check_state, check_token_arguments
from pallas_kernels.mamba3_scan.state import Mamba3State
from pallas_kernels.validation import Arg, check

OPERATION = dispatch.Operation(
    "mamba3_step",
    {
        "xla": "pallas_kernels.mamba3_step.xla",
        "reference": "pallas_kernels.mamba3_step.reference",
    },
)


def mamba3_step(
    state: Mamba3State,
    x: Float[Array, "b h p"],
    dt: Float[Array, "b h"],
    log_decay: Float[Array, "b h"],
    B: Float[Array, "b r g n"],
    C: Float[Array, "b r g n"],
    trap: Float[Array, "b h"],
    angles: Float[Array, "b 1 a"] | Float[Array, "b h a"],
    B_bias: Float[Array, "h r n"],
    C_bias: Float[Array, "h r n"],
    D: Float[Array, "h"] | None = None,
    *,
    z: Float[Array, "b h p"] | None = None,
    mimo_x: Float[Array, "h r p"] | None = None,
    mimo_z: Float[Array, "h r p"] | None = None,
    mimo_o: Float[Array, "h r p"] | None = None,
    norm_weight: Float[Array, "h p"] | None = None,
    norm_eps: float = 1e-5,
    state_indices: Int[Array, "b"] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "b h p"] | Float[Array, "b r h p"], Mamba3State]:
    """Advances the Mamba-3 recurrence by one token.

    One step of `mamba3_scan`, which gives the equations; from zeros or from its final state.

    Source: Mamba-3, as in mamba_ssm `mamba3_siso_step` and `mamba3_step_fn` with its rotary step
    (there trap comes after the sigmoid), without the in-place update.

    Axes: b batch, h heads, p headdim, r ranks, g groups, n d_state, a rotation angles; slots = b
    unless `state_indices` chooses among more.

    Args:
      state: `Mamba3State` with slots in place of b, float of any width, each array its own; the
        angle should be float32, since its rounding adds up.
      x: (b, h, p), float. One token's input.
      dt: (b, h), float. Step size, after bias and softplus: positive; dimensionless.
      log_decay: (b, h), float. dt * A, never positive.
      B: (b, r, g, n), float, dtype of x. Input map after its norm, before bias and rotation; head
        i reads group i * g // h. r = 1 without mimo_x.
      C: (b, r, g, n), float, dtype of x. Output map; as B.
      trap: (b, h), float. Before the sigmoid: the share of the input that comes at once.
      angles: (b, h, a), or (b, 1, a) when all heads share them, float. Raw: before tanh and dt.
        Radians per pi and unit step; 2 a <= n.
      B_bias: (h, r, n), float. Added to B.
      C_bias: (h, r, n), float. Added to C.
      D: (h,), float. Skip weight; no skip when omitted.
      z: (b, h, p), float, dtype of x. Gate; none when omitted.
      mimo_x: (h, r, p), float. Input weight of each rank; chooses MIMO.
      mimo_z: (h, r, p), float. Gate weight of each rank; 1 when omitted. Needs mimo_x and z.
      mimo_o: (h, r, p), float. Output weight of each rank; ranks stay apart when omitted. Needs
        mimo_x.
      norm_weight: (h, p), float. Weight of an RMS norm over p before the gate; none when omitted.
      norm_eps: Added to the mean square inside that norm.
      state_indices: (b,), int. Row of `state` for each token, each row once, all below slots;
        negative: y is 0 and nothing is updated. Row i for token i when omitted.
      implementation: None for the fastest that supports the call, or "reference" or "xla"; a named
        one that cannot run raises.

    Returns:
      y: (b, h, p), dtype of x; (b, r, h, p) with mimo_x but without mimo_o.
      state: shapes and dtypes of `state`; the rows of this token's batch are new, the angle
        modulo 2 pi.

    Raises:
      TypeError: an argument has the wrong kind of dtype, or B, C or z another dtype than x; `state`
        is no `Mamba3State`.
      ValueError: a shape disagrees with the axes above; h is no multiple of g; more than n/2
        angles; r > 1, mimo_z or mimo_o without mimo_x; mimo_z without z; odd n with mimo_x;
        unknown `implementation`.
      NotImplementedError: the named implementation cannot run these arguments; the message gives
        each reason.

    Precision: everything inside is float32 (float64 if any array is float64); y comes from the
      new state before that is rounded to the dtypes of `state`.
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
    sizes = check_token_arguments("mamba3_step", ("b",), arrays)
    check("mamba3_step", Arg("state_indices", state_indices, "b", "int"), b=sizes["b"])
    rows = "b" if state_indices is None else "slots"
    check_state("mamba3_step", "state", state, (rows,), sizes)
    options = {
        "state": state,
        "norm_eps": float(norm_eps),
        "state_indices": state_indices,
    }
    return dispatch.run(OPERATION, as_arrays(arrays | options), implementation)
