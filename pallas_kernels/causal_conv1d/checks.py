# SPDX-License-Identifier: Apache-2.0
"""Checks that only convolutions need, beside `pallas_kernels.validation`."""

import jax
from jaxtyping import Array

from pallas_kernels.validation import Arg, check


def canonical_activation(op: str, activation: str | None) -> str | None:
    """Returns None or "silu"; raises ValueError for anything but those and "swish"."""
    if activation not in (None, "silu", "swish"):
        raise ValueError(f"{op}: activation must be None, 'silu' or 'swish'; got {activation!r}")
    return None if activation is None else "silu"


def check_state(op: str, name: str, state: Array | None, axes: str, sizes: dict[str, int]) -> None:
    """Checks a convolution state, whose axis w-1 is the one axis of an op that may be empty."""
    shape = getattr(state, "shape", ())
    if sizes["w"] == 1 and len(shape) == len(axes.split()) and shape[-2] == 0:
        # Check all else about it by putting a row in.
        state = jax.ShapeDtypeStruct((*shape[:-2], 1, shape[-1]), state.dtype)
        axes = axes.replace("w-1", "w")
    check(op, Arg(name, state, axes), **sizes)
