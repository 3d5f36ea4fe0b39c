# SPDX-License-Identifier: Apache-2.0
"""Torch files without torch: tensors come out, everything else is refused by name."""

import collections
import os
import pickle
import zipfile

import ml_dtypes
import numpy as np
import pytest

from mamba_jax.checkpoint.tensor_files import PretrainedError
from mamba_jax.checkpoint.torch_file import open_tensors

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class Global:
    """Pickles as the name of something, whether or not it exists here."""

    def __init__(self, name: str, arguments: tuple = ()):
        self.name, self.arguments = name, arguments


class Writer(pickle._Pickler):
    """Writes names, and storages as persistent ids, as torch does."""

    def persistent_id(self, value):
        return value.ids if isinstance(value, Storage) else None

    def save_global_name(self, value):
        module, _, name = value.name.rpartition(".")
        self.write(pickle.GLOBAL + f"{module}\n{name}\n".encode())

    def save_call(self, value):
        if isinstance(value, Call):
            self.save_global_name(Global(value.name))
            self.save(value.arguments)
            self.write(pickle.REDUCE)
        else:
            self.save_global_name(value)

    dispatch = pickle._Pickler.dispatch | {Global: lambda self, value: self.save_call(value)}


class Call(Global):
    """Pickles as a call."""


Writer.dispatch[Call] = lambda self, value: self.save_call(value)


class Storage:
    def __init__(self, kind: str, key: str, size: int):
        self.ids = ("storage", Global(f"torch.{kind}"), key, "cpu", size)


def tensor(kind, key, size, offset, shape, strides):
    arguments = (Storage(kind, key, size), offset, shape, strides, False, collections.OrderedDict())
    return Call("torch._utils._rebuild_tensor_v2", arguments)


def save(path, content, storages=(), compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as archive:
        with archive.open("archive/data.pkl", "w") as file:
            Writer(file, 2).dump(content)
        for key, value in dict(storages).items():
            archive.writestr(f"archive/data/{key}", value.tobytes())
    return path


def test_dtypes_strides_offsets_and_shared_storages(tmp_path):
    numbers = np.arange(12, dtype=np.float32)
    storages = {
        "0": numbers,
        "1": numbers.astype(BFLOAT16),
        "2": numbers.astype(np.float16),
        "3": np.arange(3),
    }
    content = {
        "plain": tensor("FloatStorage", "0", 12, 0, (3, 4), (4, 1)),
        "transposed": tensor("FloatStorage", "0", 12, 0, (4, 3), (1, 4)),
        "row": Call(
            "torch._utils._rebuild_parameter",
            (tensor("FloatStorage", "0", 12, 4, (4,), (1,)), True, collections.OrderedDict()),
        ),
        "bf16": tensor("BFloat16Storage", "1", 12, 2, (2, 5), (5, 1)),
        "fp16": tensor("HalfStorage", "2", 12, 0, (12,), (1,)),
        "ids": tensor("LongStorage", "3", 3, 0, (3,), (1,)),
        "scalar": tensor("FloatStorage", "0", 12, 7, (), ()),
        "empty": tensor("FloatStorage", "0", 12, 0, (0, 4), (4, 1)),
    }
    found = open_tensors(save(tmp_path / "model.bin", content, storages))
    square = numbers.reshape(3, 4)
    wanted = {
        "plain": square,
        "transposed": square.T,
        "row": square[1],
        "bf16": numbers[2:].astype(BFLOAT16).reshape(2, 5),
        "fp16": numbers.astype(np.float16),
        "ids": np.arange(3),
        "scalar": np.float32(7),
        "empty": np.empty((0, 4), np.float32),
    }
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        got = found[name].read()
        assert got.dtype == value.dtype == found[name].dtype
        assert got.shape == value.shape == found[name].shape
        np.testing.assert_array_equal(got, value)
    assert not found["plain"].read().flags.writeable


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"x": Call("os.system", ("touch {marker}",))}, "refused os.system"),
        ({"x": Call("builtins.eval", ("open('{marker}', 'w')",))}, "refused builtins.eval"),
        ({"x": Call("builtins.getattr", (1, "real"))}, "refused builtins.getattr"),
        ({"x": Call("torch.nn.Linear", ())}, "refused torch.nn.Linear"),
        ({"x": Global("torch.storage._load_from_bytes")}, "refused torch.storage._load_from_bytes"),
        ({"epoch": 3}, "entry 'epoch' is no tensor but int"),
        ({"optimizer": {"lr": 0.1}}, "entry 'optimizer' is no tensor but dict"),
        ([1, 2], "wanted a dict of tensors; got list"),
        ({"x": tensor("StrangeStorage", "0", 4, 0, (4,), (1,))}, "refused torch.StrangeStorage"),
        ({"x": tensor("FloatStorage", "9", 4, 0, (4,), (1,))}, "'x' is missing or compressed"),
        ({"x": tensor("FloatStorage", "0", 4, 0, (5,), (1,))}, "cut short or damaged"),
        ({"x": tensor("FloatStorage", "0", 4, 2, (3,), (1,))}, "cut short or damaged"),
        ({"x": tensor("FloatStorage", "0", 4, 0, (2, 2), (9, 1))}, "cut short or damaged"),
        ({"x": tensor("FloatStorage", "0", 4, -1, (2,), (1,))}, "description is damaged"),
        ({"x": tensor("FloatStorage", "0", 4, 0, (2,), (-1,))}, "description is damaged"),
        ({"x": tensor("FloatStorage", "0", 4, 0, (2, 2), (1,))}, "description is damaged"),
        ({"x": tensor("FloatStorage", "../0", 4, 0, (2,), (1,))}, "refused the record"),
        ({"x": Call("torch._utils._rebuild_tensor_v2", (1, 2))}, "description is damaged"),
        ({"x": Call("torch._utils._rebuild_parameter", ("y",))}, "description is damaged"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_whatever_is_no_tensor_is_refused_by_name(tmp_path, content, message):
    marker = tmp_path / "marker"
    if isinstance(content, dict) and isinstance(content.get("x"), Call):
        call = content["x"]
        call.arguments = tuple(
            part.replace("{marker}", str(marker)) if isinstance(part, str) else part
            for part in call.arguments
        )
    path = save(tmp_path / "model.bin", content, {"0": np.zeros(4, np.float32)})
    with pytest.raises(PretrainedError) as caught:
        open_tensors(path)
    assert message in str(caught.value) and str(path) in str(caught.value)
    assert not marker.exists()


def test_files_that_are_not_torch_files(tmp_path):
    path = tmp_path / "model.bin"
    path.write_bytes(b"no archive")
    with pytest.raises(PretrainedError, match="not a zip archive"):
        open_tensors(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme", "x")
    with pytest.raises(PretrainedError, match=r"no data\.pkl"):
        open_tensors(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}q\x00(garbage")
    with pytest.raises(PretrainedError, match=r"data\.pkl is damaged"):
        open_tensors(path)
    content = {"x": tensor("FloatStorage", "0", 4, 0, (4,), (1,))}
    save(path, content, {"0": np.zeros(4, np.float32)}, zipfile.ZIP_DEFLATED)
    with pytest.raises(PretrainedError, match="missing or compressed"):
        open_tensors(path)
    whole = save(path, content, {"0": np.zeros(4, np.float32)}).read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(PretrainedError, match="damaged"):
        open_tensors(path)


def test_a_pickle_cannot_change_this_program(tmp_path):
    """State set on the admitted functions stays within one load."""
    path = tmp_path / "model.bin"
    attack = pickle.GLOBAL + b"torch._utils\n_rebuild_tensor_v2\n"
    attack += pickle.EMPTY_DICT + pickle.BUILD + pickle.STOP
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", attack)
    with pytest.raises(PretrainedError):
        open_tensors(path)
    good = {"x": tensor("FloatStorage", "0", 4, 0, (4,), (1,))}
    found = open_tensors(save(path, good, {"0": np.ones(4, np.float32)}))
    np.testing.assert_array_equal(found["x"].read(), np.ones(4))
    assert os.path.exists(path)
