# SPDX-License-Identifier: Apache-2.0
"""The norms: what their arguments mean, and their checks; `reference.py` is the definition.

Four public functions, one computation: normalise x, x * silu(z) or x + residual, scale, shift and
gate. All four reach the same implementations.
"""

import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float

from pallas_kernels import dispatch
from pallas_kernels.validation import Arg, check, check_positive

_IMPLEMENTATIONS = {
    "xla": "pallas_kernels.normalization.xla",
    "reference": "pallas_kernels.normalization.reference",
}
RMS_NORM = dispatch.Operation("rms_norm", _IMPLEMENTATIONS)
LAYER_NORM = dispatch.Operation("layer_norm", _IMPLEMENTATIONS)
ADD_RMS_NORM = dispatch.Operation("add_rms_norm", _IMPLEMENTATIONS)
ADD_LAYER_NORM = dispatch.Operation("add_layer_norm", _IMPLEMENTATIONS)


def rms_norm(
    x: Float[Array, "*batch f"],
    weight: Float[Array, "f"],
    bias: Float[Array, "f"] | None = None,
    *,
    z: Float[Array, "*batch f"] | None = None,
    eps: float = 1e-5,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    implementation: str | None = None,
) -> Float[Array, "*batch f"]:
    """Divides x by its root mean square, in groups of features and with a gate if asked.

    With rms_normed(u) = u / sqrt(mean(u * u) + eps), the mean over a group:

        y = (rms_normed(x) * weight + bias) * silu(z)     norm_before_gate, or no z
        y = rms_normed(x * silu(z)) * weight + bias       not norm_before_gate

    Source: Zhang & Sennrich 2019, arXiv:1910.07467; the gate is that of Mamba-2 (Dao & Gu 2024,
    arXiv:2405.21060). Mirrors mamba_ssm `layernorm_gated.rmsnorm_fn`.

    Axes: f features, after any number of axes.

    Args:
      x: (..., f), float.
      weight: (f,), float. Scale.
      bias: (f,), float. Shift; zero when omitted.
      z: (..., f), float. Gate; none when omitted.
      eps: Added to the mean square; in the unit of x squared.
      group_size: Neighbouring features that share a mean square; divides f. All f when omitted.
      norm_before_gate: Whether the gate multiplies what was normed, or what will be.
      implementation: None for the fastest that supports the call, or "xla" or "reference"; a named
        one that cannot run raises.

    Returns:
      y: shape and dtype of x.

    Raises:
      TypeError: an argument has the wrong kind of dtype.
      ValueError: a shape disagrees with the axes above; `group_size` does not divide f; negative
        `eps`; unknown `implementation`.
      NotImplementedError: the named implementation cannot run these arguments; the message gives
        each reason.

    Precision: everything inside is float32 (float64 if any array is float64); y is rounded once.
    Gradients: every float array. The backward pass keeps the arguments only.
    """
    arguments = _gated("rms_norm", x, weight, bias, z, eps, group_size)
    arguments |= {"centered": False, "norm_before_gate": bool(norm_before_gate)}
    return dispatch.run(RMS_NORM, arguments, implementation)[0]


def layer_norm(
    x: Float[Array, "*batch f"],
    weight: Float[Array, "f"],
    bias: Float[Array, "f"] | None = None,
    *,
    z: Float[Array, "*batch f"] | None = None,
    eps: float = 1e-5,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    implementation: str | None = None,
) -> Float[Array, "*batch f"]:
    """Subtracts the mean of x and divides by its standard deviation; else as `rms_norm`.

    With normed(u) = (u - mean(u)) / sqrt(variance(u) + eps), mean and variance over a group:

        y = (normed(x) * weight + bias) * silu(z)     norm_before_gate, or no z
        y = normed(x * silu(z)) * weight + bias       not norm_before_gate

    Source: Ba, Kiros & Hinton 2016, arXiv:1607.06450. Mirrors mamba_ssm
    `layernorm_gated.layernorm_fn`.

    Axes: f features, after any number of axes.

    Args:
      x: (..., f), float.
      weight: (f,), float. Scale.
      bias: (f,), float. Shift; zero when omitted.
      z: (..., f), float. Gate; none when omitted.
      eps: Added to the variance; in the unit of x squared.
      group_size: Neighbouring features that share statistics; divides f. All f when omitted.
      norm_before_gate: Whether the gate multiplies what was normed, or what will be.
      implementation: As for `rms_norm`.

    Returns:
      y: shape and dtype of x.

    Raises:
      As `rms_norm`.

    Precision, gradients: as `rms_norm`.
    """
    arguments = _gated("layer_norm", x, weight, bias, z, eps, group_size)
    arguments |= {"centered": True, "norm_before_gate": bool(norm_before_gate)}
    return dispatch.run(LAYER_NORM, arguments, implementation)[0]


def add_rms_norm(
    x: Float[Array, "*batch f"],
    residual: Float[Array, "*batch f"] | None,
    weight: Float[Array, "f"],
    bias: Float[Array, "f"] | None = None,
    *,
    eps: float = 1e-5,
    residual_dtype: DTypeLike = jnp.float32,
    implementation: str | None = None,
) -> tuple[Float[Array, "*batch f"], Float[Array, "*batch f"]]:
    """Adds x to the residual stream and gives the RMS norm of the sum.

        total = x + residual
        y     = total / sqrt(mean(total * total) + eps) * weight + bias

    Source: as `rms_norm`. Mirrors mamba_ssm `rms_norm_fn` with prenorm=True.

    Axes: f features, after any number of axes.

    Args:
      x: (..., f), float. What a block adds to the stream.
      residual: (..., f), float, or None. The stream before; x alone when None.
      weight: (f,), float. Scale.
      bias: (f,), float. Shift; zero when omitted.
      eps: Added to the mean square; in the unit of x squared.
      residual_dtype: Dtype of the returned sum.
      implementation: As for `rms_norm`.

    Returns:
      y: shape and dtype of x. From the sum before that is rounded to `residual_dtype`.
      residual: shape of x, `residual_dtype`. The stream after.

    Raises:
      TypeError: an argument has the wrong kind of dtype, or `residual_dtype` is not floating.
      ValueError: a shape disagrees with the axes above; negative `eps`; unknown `implementation`.
      NotImplementedError: the named implementation cannot run these arguments; the message gives
        each reason.

    Precision: everything inside is float32 (float64 if any array is float64).
    Gradients: every float array, through both outputs. The backward pass keeps the sum where
    `residual_dtype` holds it unrounded, else the arguments.
    """
    arguments = _added("add_rms_norm", x, residual, weight, bias, eps, residual_dtype)
    return dispatch.run(ADD_RMS_NORM, arguments | {"centered": False}, implementation)


def add_layer_norm(
    x: Float[Array, "*batch f"],
    residual: Float[Array, "*batch f"] | None,
    weight: Float[Array, "f"],
    bias: Float[Array, "f"] | None = None,
    *,
    eps: float = 1e-5,
    residual_dtype: DTypeLike = jnp.float32,
    implementation: str | None = None,
) -> tuple[Float[Array, "*batch f"], Float[Array, "*batch f"]]:
    """Adds x to the residual stream and gives the layer norm of the sum.

        total = x + residual
        y     = (total - mean(total)) / sqrt(variance(total) + eps) * weight + bias

    Source: as `layer_norm`. Mirrors mamba_ssm `layer_norm_fn` with prenorm=True.

    Axes: f features, after any number of axes.

    Args:
      x: (..., f), float. What a block adds to the stream.
      residual: (..., f), float, or None. The stream before; x alone when None.
      weight: (f,), float. Scale.
      bias: (f,), float. Shift; zero when omitted.
      eps: Added to the variance; in the unit of x squared.
      residual_dtype: Dtype of the returned sum.
      implementation: As for `rms_norm`.

    Returns:
      y, residual: As `add_rms_norm`.

    Raises:
      As `add_rms_norm`.

    Precision, gradients: as `add_rms_norm`.
    """
    arguments = _added("add_layer_norm", x, residual, weight, bias, eps, residual_dtype)
    return dispatch.run(ADD_LAYER_NORM, arguments | {"centered": True}, implementation)


def _gated(op, x, weight, bias, z, eps, group_size) -> dict:
    """Checks a gated norm's arguments and returns the canonical ones."""
    f = _check(op, x, "z", z, weight, bias, eps)
    check_positive(op, "group_size", group_size)
    if group_size is not None and f % group_size:
        raise ValueError(f"{op}: group_size must divide f={f}; got {group_size}")
    arguments = _arrays({"x": x, "residual": None, "z": z, "weight": weight, "bias": bias})
    return arguments | {"eps": eps, "group_size": group_size or f, "total_dtype": None}


def _added(op, x, residual, weight, bias, eps, residual_dtype) -> dict:
    """Checks an add-and-norm's arguments and returns the canonical ones."""
    f = _check(op, x, "residual", residual, weight, bias, eps)
    total_dtype = jnp.dtype(residual_dtype)
    if not jnp.issubdtype(total_dtype, jnp.floating):
        raise TypeError(f"{op}: residual_dtype must be a real floating dtype; got {total_dtype}")
    arguments = _arrays({"x": x, "residual": residual, "z": None, "weight": weight, "bias": bias})
    arguments |= {"eps": eps, "group_size": f, "total_dtype": total_dtype}
    return arguments | {"norm_before_gate": True}


def _check(op, x, other_name, other, weight, bias, eps) -> int:
    rank = len(getattr(x, "shape", ()))
    if hasattr(x, "shape") and rank == 0:
        raise ValueError(f"{op}: x must have shape (..., f); got {x.shape}")
    axes = " ".join([*(f"axis{i}" for i in range(rank - 1)), "f"])
    sizes = check(
        op,
        Arg("x", x, axes),
        Arg(other_name, other, axes),
        Arg("weight", weight, "f"),
        Arg("bias", bias, "f"),
    )
    if not eps >= 0:
        raise ValueError(f"{op}: eps must be at least 0; got {eps}")
    return sizes["f"]


def _arrays(arrays: dict[str, Array | None]) -> dict[str, Array | None]:
    return {name: None if v is None else jnp.asarray(v) for name, v in arrays.items()}
