# SPDX-License-Identifier: Apache-2.0
"""Which parameter of a model is which part of which tensor in a file.

Files pack several projections into one matrix, keep Linear weights as (out, in) and have a tensor
per layer; models here split projections by meaning, keep kernels as (in, out) and stack layers of a
kind. The module tree already says all of this (a `SplitLinear` knows its pieces in the packed
order), so the map is read off an abstract model instead of being written down per architecture.
Names in files are those of mamba_ssm.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from flax import nnx

from mamba_jax.layers.attention import MHA
from mamba_jax.layers.conv import CausalConv1d, SplitCausalConv1d
from mamba_jax.layers.linear import Linear, SplitLinear
from mamba_jax.mixers.mamba2 import Mamba2
from mamba_jax.model import MambaLMHeadModel

ParameterPath = tuple[str | int, ...]


@dataclasses.dataclass(frozen=True)
class Piece:
    """A parameter's share of a tensor.

    Attributes:
      path: The parameter in the model's tree of parameters.
      layer: Index on the parameter's leading axis; None when it is not stacked.
      form: "same", "transposed", "conv" (the file has an axis of size 1 in the middle) or "flat"
        (the file has one axis).
      shape: The parameter's shape, without the axis of layers.
      axis, start, stop: Where the piece lies in the file's tensor.
    """

    path: ParameterPath
    layer: int | None
    form: str
    shape: tuple[int, ...]
    axis: int
    start: int
    stop: int

    def to_file(self, value: np.ndarray) -> np.ndarray:
        """The parameter of one layer in the file's form."""
        match self.form:
            case "transposed":
                return value.T
            case "conv":
                return value[:, None, :]
            case "flat":
                return value.reshape(-1)
        return value

    def from_file(self, tensor: np.ndarray) -> np.ndarray:
        """A view of this piece of the file's tensor, in the parameter's form."""
        value = tensor[(slice(None),) * self.axis + (slice(self.start, self.stop),)]
        match self.form:
            case "transposed":
                return value.T
            case "conv":
                return value[:, 0, :]
            case "flat":
                return value.reshape(self.shape)
        return value


@dataclasses.dataclass(frozen=True)
class FileTensor:
    """A tensor of a file and the parameters that make it up, in order along one axis."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    pieces: tuple[Piece, ...]

    def assemble(self, parameter: Callable[[ParameterPath, int | None], np.ndarray]) -> np.ndarray:
        """Builds the tensor from parameters given by path and layer."""
        parts = [piece.to_file(parameter(piece.path, piece.layer)) for piece in self.pieces]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=self.pieces[0].axis)


def file_tensors(model: MambaLMHeadModel) -> list[FileTensor]:
    """Returns the tensors of a model's file; `model` may be abstract.

    A tied head is left out: it is the embedding under another name.
    """
    tensors = list(module_tensors(model.embedding, ("embedding",), "backbone.embedding", None))
    for run, (_, first, count) in enumerate(model.config.runs):
        for layer in range(count):
            name = f"backbone.layers.{first + layer}"
            tensors += module_tensors(model.runs[run], ("runs", run), name, layer)
    tensors += module_tensors(model.norm_f, ("norm_f",), "backbone.norm_f", None)
    if model.lm_head is not None:
        tensors += module_tensors(model.lm_head, ("lm_head",), "lm_head", None)
    return tensors


def module_tensors(
    module: Any, path: ParameterPath, name: str, layer: int | None
) -> Iterator[FileTensor]:
    """The tensors of a module and those below it."""

    def tensor(key: str, form: str, axis: int, *members: tuple[str, ...]) -> Iterator[FileTensor]:
        if _find(module, members[0]) is not None:
            found = [(path + member, _find(module, member)) for member in members]
            yield _file_tensor(f"{name}.{key}", found, layer, form, axis)

    match module:
        case SplitLinear():
            names = [piece for piece, _ in module.pieces]
            yield from tensor("weight", "transposed", 0, *((piece, "kernel") for piece in names))
            yield from tensor("bias", "same", 0, *((piece, "bias") for piece in names))
        case Linear():
            yield from tensor("weight", "transposed", 0, ("kernel",))
            yield from tensor("bias", "same", 0, ("bias",))
        case SplitCausalConv1d():
            names = [piece for piece, _ in module.pieces]
            yield from tensor("weight", "conv", 0, *((piece, "weight") for piece in names))
            yield from tensor("bias", "same", 0, *((piece, "bias") for piece in names))
        case CausalConv1d():
            yield from tensor("weight", "conv", 0, ("weight",))
            yield from tensor("bias", "same", 0, ("bias",))
        case _:
            for key, child in vars(module).items():
                if isinstance(child, nnx.Param):
                    flat = key == "D" and isinstance(module, Mamba2)
                    yield from tensor(key, "flat" if flat else "same", 0, (key,))
                elif key == "out_proj" and getattr(module, "out_proj_mlp", None) is not None:
                    # One matrix in the file: Mamba-2 reads the MLP's channels first, MHA last.
                    halves = [("out_proj", "kernel"), ("out_proj_mlp", "kernel")]
                    halves = halves if isinstance(module, MHA) else halves[::-1]
                    yield from tensor("out_proj.weight", "transposed", 1, *halves)
                    yield from tensor("out_proj.bias", "same", 0, ("out_proj", "bias"))
                elif isinstance(child, nnx.Module) and key != "out_proj_mlp":
                    yield from module_tensors(child, (*path, key), f"{name}.{key}", layer)


def _find(module: Any, member: tuple[str, ...]) -> nnx.Param | None:
    for key in member:
        module = getattr(module, key)
    return module


def _file_tensor(
    name: str,
    parameters: list[tuple[ParameterPath, nnx.Param]],
    layer: int | None,
    form: str,
    axis: int,
) -> FileTensor:
    pieces, start = [], 0
    for path, parameter in parameters:
        shape = tuple(parameter.shape)[0 if layer is None else 1 :]
        file_shape = {
            "transposed": shape[::-1],
            "conv": (shape[0], 1, shape[-1]),
            "flat": (math.prod(shape),),
        }.get(form, shape)
        stop = start + file_shape[axis]
        pieces.append(Piece(path, layer, form, shape, axis, start, stop))
        start = stop
    whole = (*file_shape[:axis], start, *file_shape[axis + 1 :])
    return FileTensor(name, whole, np.dtype(parameters[0][1].dtype), tuple(pieces))
