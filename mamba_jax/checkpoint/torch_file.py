# SPDX-License-Identifier: Apache-2.0
"""Files written by `torch.save`, read without torch and without running anything in them.

Such a file is a zip archive of `data.pkl`, a pickle that describes tensors, and their storages as
raw bytes. A pickle may name any function to be called; here only the four names below mean
anything, each stands for a function of ours that makes a description, and every other name is
refused.
"""

import collections
import functools
import math
import pickle
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from mamba_jax.checkpoint.tensor_files import PretrainedError, StoredTensor

_STORAGES = {
    "DoubleStorage": np.dtype(np.float64),
    "FloatStorage": np.dtype(np.float32),
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "LongStorage": np.dtype(np.int64),
    "IntStorage": np.dtype(np.int32),
    "ShortStorage": np.dtype(np.int16),
    "CharStorage": np.dtype(np.int8),
    "ByteStorage": np.dtype(np.uint8),
    "BoolStorage": np.dtype(np.bool_),
}
_LOCAL_HEADER = 30


class _StorageKind(NamedTuple):
    name: str


class _Storage(NamedTuple):
    key: str
    dtype: np.dtype


class _Tensor(NamedTuple):
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def open_tensors(path: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of a file by name.

    Raises:
      PretrainedError: the file is not what `torch.save` writes for a dict of tensors; the message
        names what was refused.
    """
    try:
        archive = zipfile.ZipFile(path)
    except zipfile.BadZipFile:
        raise PretrainedError(
            f"{path} is damaged or not a zip archive as torch.save writes since torch 1.6"
        ) from None
    with archive:
        pickles = [name for name in archive.namelist() if name.split("/")[1:] == ["data.pkl"]]
        if len(pickles) != 1:
            raise PretrainedError(f"{path} holds no data.pkl: not written by torch.save")
        folder = pickles[0].removesuffix("data.pkl")
        order = f"{folder}byteorder"
        if order in archive.namelist() and archive.read(order).strip() != b"little":
            raise PretrainedError(f"{path} was written on a big-endian machine")
        with archive.open(pickles[0]) as file:
            content = _load(path, file)
        files = {info.filename: info for info in archive.infolist()}
    if not isinstance(content, dict):
        raise PretrainedError(f"{path}: wanted a dict of tensors; got {type(content).__name__}")
    mapped = np.memmap(path, np.uint8, mode="r")
    tensors = {}
    for name, value in dict.items(content):
        if not isinstance(value, _Tensor) or not isinstance(name, str):
            kind = type(value).__name__.lstrip("_")
            raise PretrainedError(f"{path}: entry {name!r} is no tensor but {kind}")
        info = files.get(f"{folder}data/{value.storage.key}")
        tensors[name] = _stored(path, name, value, info, mapped)
    return tensors


def _load(path: Path, file: Any) -> Any:
    try:
        return _TensorUnpickler(file).load()
    except PretrainedError as error:
        raise PretrainedError(f"{path}: {error}") from None
    except Exception as error:  # a damaged pickle can fail in any way
        reason = f"{type(error).__name__}: {error}"
        raise PretrainedError(f"{path}: data.pkl is damaged ({reason})") from None


class _TensorUnpickler(pickle.Unpickler):
    """Admits dicts, numbers, strings and tensors."""

    def find_class(self, module: str, name: str) -> Any:
        """Maps the admitted names to functions that only describe; refuses every other name."""
        # A pickle can change the objects it is given, so each load gets objects of its own.
        if (module, name) == ("collections", "OrderedDict"):
            return functools.partial(collections.OrderedDict)
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return functools.partial(_tensor)
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return functools.partial(_parameter)
        if module == "torch" and name in _STORAGES:
            return _StorageKind(name)
        raise PretrainedError(f"refused {module}.{name}: only tensors are read")

    def persistent_load(self, pid: Any) -> _Storage:
        """Describes a storage, which the pickle mentions by number."""
        match pid:
            case ("storage", _StorageKind(name), str(key), str(), int()) if key.isalnum():
                return _Storage(key, _STORAGES[name])
        raise PretrainedError(f"refused the record {pid!r}: only tensors are read")


def _tensor(*arguments: Any) -> _Tensor:
    match arguments:
        case (_Storage() as storage, int(offset), tuple(shape), tuple(strides), *_):
            whole = all(isinstance(number, int) for number in (*shape, *strides))
            if whole and len(shape) == len(strides) and min((offset, *shape, *strides)) >= 0:
                return _Tensor(storage, offset, shape, strides)
    raise PretrainedError("a tensor's description is damaged")


def _parameter(*arguments: Any) -> _Tensor:
    match arguments:
        case (_Tensor() as tensor, *_):
            return tensor
    raise PretrainedError("a parameter's description is damaged")


def _stored(
    path: Path, name: str, tensor: _Tensor, info: zipfile.ZipInfo | None, mapped: np.ndarray
) -> StoredTensor:
    """Finds a tensor's bytes in the archive; its description is not trusted."""
    dtype = tensor.storage.dtype
    if info is None or info.compress_type != zipfile.ZIP_STORED:
        raise PretrainedError(f"{path}: the storage of tensor {name!r} is missing or compressed")
    # The central directory does not say how long the local header is.
    header = mapped[info.header_offset : info.header_offset + _LOCAL_HEADER]
    names = int.from_bytes(header[26:28].tobytes(), "little")
    extra = int.from_bytes(header[28:30].tobytes(), "little")
    begin = info.header_offset + _LOCAL_HEADER + names + extra
    end = begin + info.file_size
    spans = zip(tensor.shape, tensor.strides, strict=True)
    last = tensor.offset + sum((size - 1) * stride for size, stride in spans)
    empty = 0 in tensor.shape
    if end > mapped.size or (not empty and (last + 1) * dtype.itemsize > info.file_size):
        raise PretrainedError(f"{path} is cut short or damaged at tensor {name!r}")
    place = (path, tensor.storage.key, tensor.offset, tensor.shape, tensor.strides)

    def read() -> np.ndarray:
        if empty:
            return np.empty(tensor.shape, dtype)
        count = info.file_size // dtype.itemsize
        storage = mapped[begin : begin + count * dtype.itemsize].view(dtype)[tensor.offset :]
        if tensor.strides == _contiguous(tensor.shape):
            return storage[: math.prod(tensor.shape)].reshape(tensor.shape)
        strides = tuple(stride * dtype.itemsize for stride in tensor.strides)
        return np.lib.stride_tricks.as_strided(storage, tensor.shape, strides, writeable=False)

    return StoredTensor(tensor.shape, dtype, place, read)


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
