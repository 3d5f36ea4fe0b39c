# SPDX-License-Identifier: Apache-2.0
"""The safetensors format, read as a mapped file and written tensor by tensor.

A file is the header's length (8 bytes, little endian), a JSON header (name → dtype, shape, begin
and end), and the tensors' bytes. The library would do, but it does not write without holding every
tensor at once, and its numpy side does not know bfloat16 in all versions.
"""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

from mamba_jax.checkpoint.tensor_files import PretrainedError, StoredTensor

_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LONGEST_HEADER = 100_000_000


def open_tensors(path: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of a file by name.

    Raises:
      PretrainedError: the file is no safetensors file, is cut short, or lies about its contents.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        if not 8 < start <= min(size, _LONGEST_HEADER):
            raise PretrainedError(f"{path} is not a safetensors file")
        try:
            header = json.loads(file.read(start - 8))
        except ValueError:
            raise PretrainedError(f"{path} is not a safetensors file") from None
    if not isinstance(header, dict):
        raise PretrainedError(f"{path} is not a safetensors file")
    mapped = np.memmap(path, np.uint8, mode="r") if size else np.empty(0, np.uint8)
    return {
        name: _stored(path, name, entry, mapped, start)
        for name, entry in header.items()
        if name != "__metadata__"
    }


def write(
    path: Path, tensors: Mapping[str, tuple[tuple[int, ...], np.dtype, Callable[[], np.ndarray]]]
) -> None:
    """Writes a file, one tensor at a time.

    Args:
      path: The file.
      tensors: Name → shape, dtype and a function that makes the array. Written in sorted order, so
        that the same tensors give the same bytes.
    """
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in sorted(tensors):
        shape, dtype, _ = tensors[name]
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": _NAMES[np.dtype(dtype)],
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for name in sorted(tensors):
            shape, dtype, make = tensors[name]
            array = np.ascontiguousarray(make())
            assert array.shape == tuple(shape) and array.dtype == dtype, name
            file.write(array.reshape(-1).view(np.uint8).data)


def _stored(path: Path, name: str, entry: dict, mapped: np.ndarray, start: int) -> StoredTensor:
    try:
        shape = tuple(int(size) for size in entry["shape"])
        begin, end = (start + int(offset) for offset in entry["data_offsets"])
        dtype = _DTYPES.get(entry["dtype"])
    except (TypeError, KeyError, ValueError):
        raise PretrainedError(f"{path}: the entry of tensor {name!r} is damaged") from None
    if dtype is None:
        raise PretrainedError(f"{path}: tensor {name!r} has the unknown dtype {entry['dtype']!r}")
    fits = min(shape, default=0) >= 0 and math.prod(shape) * dtype.itemsize == end - begin
    if not fits or not start <= begin <= end <= mapped.size:
        raise PretrainedError(f"{path} is cut short or damaged at tensor {name!r}")

    def read() -> np.ndarray:
        return mapped[begin:end].view(dtype).reshape(shape)

    return StoredTensor(shape, dtype, (path, begin), read)
