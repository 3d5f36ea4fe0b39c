# SPDX-License-Identifier: Apache-2.0
"""Where a published model's files are: a directory, or a hub id that is fetched to one."""

import dataclasses
import re
from pathlib import Path

from mamba_jax.checkpoint.tensor_files import PretrainedError, shards

_CONFIG = "config.json"
# In order of preference.
_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
# Copied beside converted weights, and fetched with them.
COMPANIONS = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


@dataclasses.dataclass(frozen=True)
class LocalFiles:
    """A model's files on this machine.

    Attributes:
      directory: Where they are.
      config: The `config.json`; None when there is none.
      weights: The file of weights, or its shards in order.
    """

    directory: Path
    config: Path | None
    weights: tuple[Path, ...]


def local_files(path: str | Path, *, revision: str | None = None) -> LocalFiles:
    """Finds a model's files, fetching them when `path` is a hub id and no directory.

    Args:
      path: A directory, or a hub id such as "state-spaces/mamba2-130m".
      revision: Branch, tag or commit on the hub.

    Raises:
      PretrainedError: nothing there; no weights among it; the hub cannot be reached.
    """
    directory = Path(path)
    if not directory.is_dir():
        if directory.exists():
            raise PretrainedError(f"wanted the directory of a checkpoint; {path} is a file")
        if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", str(path)):
            raise PretrainedError(f"no directory {path}")
        directory = _fetch(str(path), revision)
    weights = _choose([name for name in _WEIGHTS if (directory / name).is_file()])
    if weights is None:
        raise PretrainedError(f"{path} holds no weights (wanted one of {', '.join(_WEIGHTS)})")
    files = (directory / weights,)
    if weights.endswith(".index.json"):
        files = shards(directory / weights)
    config = directory / _CONFIG
    return LocalFiles(directory, config if config.is_file() else None, files)


def _fetch(hub_id: str, revision: str | None) -> Path:
    """Returns the local copy of a hub model, with no more files than are needed."""
    try:
        import huggingface_hub as hub
    except ImportError:
        raise PretrainedError(
            f"no directory {hub_id}; hub ids need huggingface-hub: pip install 'mamba_jax[hf]'"
        ) from None
    try:
        names = hub.list_repo_files(hub_id, revision=revision)
        weights = _choose([name for name in _WEIGHTS if name in names])
        wanted = [name for name in (_CONFIG, weights, *COMPANIONS) if name in names]
        if weights is not None and weights.endswith(".index.json"):
            index = Path(hub.hf_hub_download(hub_id, weights, revision=revision))
            wanted += [shard.name for shard in shards(index)]
        path = hub.snapshot_download(hub_id, revision=revision, allow_patterns=wanted)
    except PretrainedError:
        raise
    except Exception as error:  # the hub's clients raise many kinds
        try:
            # Whatever was fetched before still serves.
            path = hub.snapshot_download(hub_id, revision=revision, local_files_only=True)
        except Exception:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise PretrainedError(
                f"no directory {hub_id}, and the hub gave no model of that id: {reason[:200]}"
            ) from None
    return Path(path)


def _choose(present: list[str]) -> str | None:
    return present[0] if present else None
