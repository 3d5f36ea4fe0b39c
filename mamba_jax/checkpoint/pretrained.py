# SPDX-License-Identifier: Apache-2.0
"""Published models in and out: the layouts of state-spaces and of Hugging Face transformers.

`files.py` finds the files, `torch_file.py` and `safetensors_file.py` open them, `state_spaces.py`
and `huggingface.py` know each layout's config, `packing.py` knows which parameter is where.
"""

import dataclasses
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from mamba_jax.checkpoint import huggingface, safetensors_file, state_spaces
from mamba_jax.checkpoint.files import LocalFiles, local_files
from mamba_jax.checkpoint.packing import FileTensor, ParameterPath, Piece, file_tensors
from mamba_jax.checkpoint.tensor_files import (
    PretrainedError,
    StoredTensor,
    open_tensors,
    read_json,
)
from mamba_jax.config import MambaConfig
from mamba_jax.model import MambaLMHeadModel
from mamba_jax.partitioning.rules import parameter_shardings

__all__ = ["PretrainedError", "from_pretrained", "local_files", "save_pretrained", "stored_dtype"]

FORMATS: dict[str, ModuleType] = {"state-spaces": state_spaces, "hf": huggingface}
_EMBEDDING, _HEAD = "backbone.embedding.weight", "lm_head.weight"


def from_pretrained(
    path: str | Path,
    *,
    dtype: jnp.dtype | None = None,
    param_dtype: jnp.dtype | None = None,
    mesh: Mesh | None = None,
    config: MambaConfig | None = None,
    revision: str | None = None,
    implementation: str | None = None,
    remat: bool = False,
    unroll: int | bool = 1,
) -> MambaLMHeadModel:
    """Loads a published checkpoint.

    The layout is told by `config.json`. Weights are read from the mapped file piece by piece,
    straight into the shards of each device: the host holds one parameter at a time.

    Args:
      path: A directory with `config.json` and weights (safetensors or a torch file, whole or in
        shards), or a hub id such as "state-spaces/mamba2-130m".
      dtype: Compute dtype; that of the weights when None.
      param_dtype: Dtype of the stored weights; `dtype` when None, float32 when that is None too.
        To train in bfloat16 with fp32 masters: dtype=bfloat16, param_dtype=float32.
      mesh: Places the parameters on it; the default device when None.
      config: Used instead of `config.json` (Mamba-3 weights of before June 2026 need
        A_activation="softplus", which no file says).
      revision: Branch, tag or commit on the hub.
      implementation, remat, unroll: As for `MambaLMHeadModel`.

    Returns:
      The model.

    Raises:
      PretrainedError: (a ValueError) no such checkpoint; a damaged file; something in it that is no
        tensor; tensors missing, unexpected or of another shape, all of them listed.
    """
    files = local_files(path, revision=revision)
    stored = {_original_name(name): t for name, t in open_tensors(files.weights).items()}
    config = _fit_vocabulary(config or _read_config(files), stored)
    make = partial(
        MambaLMHeadModel,
        config,
        dtype=dtype or param_dtype,
        param_dtype=param_dtype or dtype or jnp.float32,
        implementation=implementation,
        remat=remat,
        unroll=unroll,
    )
    abstract = jax.eval_shape(lambda: make(rngs=nnx.Rngs(0)))
    tensors = file_tensors(abstract)
    _check(tensors, stored, config, files)
    graph, state, rest = nnx.split(abstract, nnx.Param, ...)
    shardings = None if mesh is None else parameter_shardings(abstract, mesh, config)
    nnx.replace_by_pure_dict(state, _load(nnx.to_pure_dict(state), shardings, tensors, stored))
    return nnx.merge(graph, state, rest)


def save_pretrained(
    model: MambaLMHeadModel, path: str | Path, *, format: str = "state-spaces"
) -> None:
    """Writes `config.json` and `model.safetensors`, one tensor at a time.

    Saving, loading and saving again gives the same bytes.

    Args:
      model: The model.
      path: A directory, made when missing.
      format: "state-spaces" (the original's names) or "hf" (transformers).

    Raises:
      PretrainedError: (a ValueError) an unknown format, or one that cannot express the model.
    """
    if format not in FORMATS:
        raise PretrainedError(f"format must be one of {', '.join(FORMATS)}; got {format!r}")
    layout = FORMATS[format]
    _, state, _ = nnx.split(model, nnx.Param, ...)
    parameters = nnx.to_pure_dict(state)
    config_text = layout.write_config(model.config, str(jnp.dtype(model.embedding.weight.dtype)))

    def parameter(where: ParameterPath, layer: int | None) -> np.ndarray:
        value = _get(parameters, where)
        return np.asarray(value if layer is None else value[layer])

    tensors = file_tensors(model)
    if model.config.tie_embeddings and layout.TIED_HEAD_IS_WRITTEN:
        tensors.append(dataclasses.replace(tensors[0], name=_HEAD))
    entries = {
        layout.file_name(t.name): (t.shape, t.dtype, partial(t.assemble, parameter))
        for t in tensors
    }
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    partial_weights = directory / f"model.safetensors.{os.getpid()}.part"
    partial_config = directory / f"config.json.{os.getpid()}.part"
    try:
        safetensors_file.write(partial_weights, entries)
        partial_config.write_text(config_text, encoding="utf-8")
        partial_weights.replace(directory / "model.safetensors")
        partial_config.replace(directory / "config.json")
    finally:
        partial_weights.unlink(missing_ok=True)
        partial_config.unlink(missing_ok=True)


def stored_dtype(path: str | Path, *, revision: str | None = None) -> np.dtype:
    """Returns the dtype of a checkpoint's embedding: what its weights were published in."""
    for name, tensor in open_tensors(local_files(path, revision=revision).weights).items():
        if _original_name(name) == _EMBEDDING:
            return tensor.dtype
    raise PretrainedError(f"{path} holds no embedding")


def _read_config(files: LocalFiles) -> MambaConfig:
    if files.config is None:
        raise PretrainedError(f"{files.directory} has no config.json")
    content = read_json(files.config)
    layout = huggingface if "model_type" in content else state_spaces
    try:
        return layout.read_config(content)
    except PretrainedError as error:
        raise PretrainedError(f"{files.config}: {error}") from None


def _original_name(name: str) -> str:
    return name.replace("backbone.embeddings.", "backbone.embedding.")


def _fit_vocabulary(config: MambaConfig, stored: Mapping[str, StoredTensor]) -> MambaConfig:
    """Takes the embedding's rows from the file: 50277 ids are padded to 50280 or to 50288."""
    if _EMBEDDING not in stored or not stored[_EMBEDDING].shape:
        return config
    rows = stored[_EMBEDDING].shape[0]
    for multiple in (config.pad_vocab_size_multiple, *(2**n for n in range(11))):
        if -(-config.vocab_size // multiple) * multiple == rows:
            return dataclasses.replace(config, pad_vocab_size_multiple=multiple)
    return config


def _check(
    tensors: list[FileTensor],
    stored: Mapping[str, StoredTensor],
    config: MambaConfig,
    files: LocalFiles,
) -> None:
    """Compares what the model needs with what the file holds; lists every difference."""
    wanted = {tensor.name: tensor.shape for tensor in tensors}
    if config.tie_embeddings and _HEAD in stored:
        wanted[_HEAD] = wanted[_EMBEDDING]
    faults = [f"missing {name} {list(wanted[name])}" for name in wanted if name not in stored]
    extra = stored.keys() - wanted.keys()
    faults += [f"unexpected {name} {list(stored[name].shape)}" for name in extra]
    for name in wanted.keys() & stored.keys():
        tensor = stored[name]
        if tensor.shape != wanted[name]:
            faults.append(f"{name}: wanted {list(wanted[name])}, got {list(tensor.shape)}")
        elif not jnp.issubdtype(tensor.dtype, jnp.floating):
            faults.append(f"{name}: wanted floats, got {tensor.dtype}")
    if not faults and config.tie_embeddings and _HEAD in stored:
        head, embedding = stored[_HEAD], stored[_EMBEDDING]
        if head.place != embedding.place and not _same(head.read(), embedding.read()):
            faults.append(f"{_HEAD} differs from the embedding, which tie_embeddings says it is")
    if faults:
        raise PretrainedError(
            f"{files.directory} does not hold the weights its config describes:\n  "
            + "\n  ".join(sorted(faults))
        )


def _same(a: np.ndarray, b: np.ndarray, rows: int = 4096) -> bool:
    starts = range(0, len(a), rows)
    return all(np.array_equal(a[i : i + rows], b[i : i + rows], equal_nan=True) for i in starts)


def _load(
    abstract: dict,
    shardings: nnx.State | None,
    tensors: list[FileTensor],
    stored: Mapping[str, StoredTensor],
) -> dict:
    """Returns the tree of parameters, each read into place."""
    places = None if shardings is None else nnx.to_pure_dict(shardings)
    sources: dict[ParameterPath, list[tuple[Piece, StoredTensor]]] = {}
    for tensor in tensors:
        for piece in tensor.pieces:
            sources.setdefault(piece.path, []).append((piece, stored[tensor.name]))
    # One file's tensor feeds several parameters: each is read when its turn comes.
    for path, source in sources.items():
        leaf = _get(abstract, path)
        read = partial(_read, source, leaf.shape, leaf.dtype)
        if places is None:
            value = jnp.asarray(read((slice(None),) * leaf.ndim))
        else:
            value = jax.make_array_from_callback(leaf.shape, _get(places, path), read)
        _get(abstract, path[:-1])[path[-1]] = value
    return abstract


def _read(
    source: list[tuple[Piece, StoredTensor]],
    shape: tuple[int, ...],
    dtype: jnp.dtype,
    index: tuple[slice, ...],
) -> np.ndarray:
    """Reads a block of a parameter; the rest of it is not touched."""
    ranges = [range(*piece.indices(size)) for piece, size in zip(index, shape, strict=True)]
    block = np.empty([len(r) for r in ranges], dtype)
    if source[0][0].layer is None:
        piece, tensor = source[0]
        block[...] = piece.from_file(tensor.read())[index]
        return block
    for row, layer in enumerate(ranges[0]):
        piece, tensor = source[layer]
        assert piece.layer == layer
        block[row] = piece.from_file(tensor.read())[index[1:]]
    return block


def _get(tree: Any, path: ParameterPath) -> Any:
    for key in path:
        tree = tree[key]
    return tree
