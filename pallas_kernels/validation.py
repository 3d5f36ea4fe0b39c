# SPDX-License-Identifier: Apache-2.0
"""Checks arguments where they enter an op, at trace time.

One function, `check`, loops over (name, array, axes); every message names the op, the argument,
what was wanted and what came. It knows nothing about any particular op.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Arg:
    """An array argument and what it must look like.

    Attributes:
      name: As the caller spells it.
      value: The array, or None when it was left out (then nothing is checked).
      axes: Axis letters, e.g. "b t h p"; "w-1" is an axis one shorter than w; alternatives are
        separated by "|" and told apart by rank, e.g. "h | h p".
      kind: "float" (real floating), "activation" (float, the same dtype as every other
        "activation"), "inexact" (float or complex), "int".
    """

    name: str
    value: Any
    axes: str
    kind: str = "float"


def check(op: str, *args: Arg, **sizes: int) -> dict[str, int]:
    """Checks every argument against its axes and kind.

    Args:
      op: Name of the op, for messages.
      *args: In the order in which axis sizes become known; the first use of a letter fixes it.
      **sizes: Axis sizes known beforehand.

    Returns:
      Axis letter → size.

    Raises:
      TypeError: an argument is no array, or has the wrong kind of dtype.
      ValueError: an argument has the wrong rank or an axis of another size.
    """
    owner: dict[str, str] = {}
    activation: Arg | None = None
    for arg in args:
        if arg.value is None:
            continue
        if not (hasattr(arg.value, "shape") and hasattr(arg.value, "dtype")):
            raise TypeError(
                f"{op}: {arg.name} must be an array ({_tuple(arg.axes)}); "
                f"got {type(arg.value).__name__}"
            )
        _check_kind(op, arg, activation)
        if arg.kind == "activation":
            activation = activation or arg
        _check_axes(op, arg, sizes, owner)
    return sizes


def check_groups(op: str, count_name: str, count: int, groups: int) -> None:
    """Raises ValueError unless `groups` divides the heads or channels that share its B and C."""
    if groups < 1 or count % groups:
        raise ValueError(
            f"{op}: the number of groups g of B and C must divide {count_name}={count}; "
            f"got g={groups}"
        )


def check_positive(op: str, name: str, value: int | None) -> None:
    """Raises unless `value` is None or an integer of at least 1."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{op}: {name} must be an int or None; got {value!r}")
    if value < 1:
        raise ValueError(f"{op}: {name} must be at least 1; got {value}")


def _check_kind(op: str, arg: Arg, activation: Arg | None) -> None:
    dtype = arg.value.dtype
    wanted = {
        "float": (jnp.floating, "a real floating dtype"),
        "activation": (jnp.floating, "a real floating dtype"),
        "inexact": (jnp.inexact, "a floating or complex dtype"),
        "int": (jnp.integer, "an integer dtype"),
    }[arg.kind]
    if not jnp.issubdtype(dtype, wanted[0]):
        raise TypeError(f"{op}: {arg.name} must have {wanted[1]}; got {dtype}")
    if arg.kind == "activation" and activation is not None and dtype != activation.value.dtype:
        raise TypeError(
            f"{op}: {arg.name} must have the dtype of {activation.name}, "
            f"{activation.value.dtype}; got {dtype}"
        )


def _check_axes(op: str, arg: Arg, sizes: dict[str, int], owner: dict[str, str]) -> None:
    shape = tuple(arg.value.shape)
    alternatives = [alternative.split() for alternative in arg.axes.split("|")]
    axes = next((a for a in alternatives if len(a) == len(shape)), None)
    if axes is None:
        raise ValueError(f"{op}: {arg.name} must have shape ({_tuple(arg.axes)}); got {shape}")
    for axis, size in zip(axes, shape, strict=True):
        letter, _, less = axis.partition("-")
        wanted = size if letter not in sizes else sizes[letter] - int(less or 0)
        if size != wanted:
            known = ", ".join(f"{k}={v}" for k, v in sizes.items() if k in _letters(axes))
            source = f" (from {owner[letter]})" if letter in owner else ""
            raise ValueError(
                f"{op}: {arg.name} must have shape ({', '.join(axes)}) with {known}{source}; "
                f"got {shape}"
            )
        if letter not in sizes:
            sizes[letter] = size + int(less or 0)
            owner[letter] = arg.name
    if 0 in shape:
        raise ValueError(f"{op}: every axis of {arg.name} must have at least 1 entry; got {shape}")


def _letters(axes: list[str]) -> set[str]:
    return {axis.partition("-")[0] for axis in axes}


def _tuple(axes: str) -> str:
    return " or ".join(", ".join(alternative.split()) for alternative in axes.split("|"))
