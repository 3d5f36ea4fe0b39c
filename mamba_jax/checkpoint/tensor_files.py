# SPDX-License-Identifier: Apache-2.0
"""Tensors in files, read only where and when they are needed.

`torch_file.py` and `safetensors_file.py` open files of their kind; both give `StoredTensor`s, which
are views of the file mapped into memory, not copies.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np


class PretrainedError(ValueError):
    """A checkpoint that cannot be read or written; the message is for the user."""


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
      shape: Its shape.
      dtype: Its dtype; bfloat16 is that of ml_dtypes.
      place: What two tensors that share their storage have in common.
      read: Returns a read-only view of the mapped file.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    place: tuple
    read: Callable[[], np.ndarray]


def open_tensors(paths: tuple[Path, ...]) -> dict[str, StoredTensor]:
    """Returns the tensors of one file, or of all shards, by name.

    Raises:
      PretrainedError: a file is missing, damaged or holds something other than tensors; a name
        occurs twice.
    """
    from mamba_jax.checkpoint import safetensors_file, torch_file

    tensors: dict[str, StoredTensor] = {}
    for path in paths:
        if not path.is_file():
            raise PretrainedError(f"no file {path}")
        opener = safetensors_file if path.suffix == ".safetensors" else torch_file
        found = opener.open_tensors(path)
        if twice := tensors.keys() & found.keys():
            raise PretrainedError(f"{path}: tensor {min(twice)!r} is also in another shard")
        tensors |= found
    return tensors


def shards(index: Path) -> tuple[Path, ...]:
    """Returns the files that an index file (`*.index.json`) names, in order.

    Raises:
      PretrainedError: the index cannot be read, or names a file outside its directory.
    """
    content = read_json(index)
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, Mapping) or not weight_map:
        raise PretrainedError(f"{index}: no weight_map")
    names = sorted(set(weight_map.values()))
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise PretrainedError(f"{index}: wanted names of files beside it; got {name!r}")
    return tuple(index.parent / name for name in names)


def read_json(path: Path) -> dict:
    """Reads a JSON object; errors name the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PretrainedError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise PretrainedError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise PretrainedError(f"{path}: wanted a JSON object; got {type(content).__name__}")
    return content
