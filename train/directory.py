# SPDX-License-Identifier: Apache-2.0
"""A run's directory: config.json, metrics.jsonl, checkpoints/, loss.png, sample.txt."""

import json
import platform
import shutil
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import jax

from train.config import TrainConfig, UserError
from train.files import write_whole

CONFIG, METRICS, CHECKPOINTS = "config.json", "metrics.jsonl", "checkpoints"
PLOT, SAMPLE = "loss.png", "sample.txt"


def open_directory(config: TrainConfig) -> Path:
    """Makes the run's directory; with `overwrite` empties it of an earlier run.

    Raises:
      UserError: it holds a run that is neither to be resumed nor overwritten, or cannot be made.
    """
    directory = Path(config.directory)
    holds_run = (directory / CONFIG).exists() or (directory / CHECKPOINTS).exists()
    if holds_run and not (config.resume or config.overwrite):
        raise UserError(
            f"output: wanted a new directory, or --resume or --overwrite, got {directory} "
            "(holds a run)"
        )
    if jax.process_index() == 0:
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"output: wanted a directory, got {directory} ({error.strerror})"
            ) from None
        if config.overwrite and not config.resume:
            _empty(directory)
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices("directory")
    return directory


def save_config(config: TrainConfig, directory: Path) -> None:
    """Writes the resolved config, its hash and the versions it ran with."""
    if jax.process_index() == 0:
        versions = {name: version(name) for name in ("jax", "flax", "optax", "numpy")}
        content = {
            "hash": config.hash,
            "config": config.to_dict(),
            "versions": {"python": platform.python_version(), **versions},
            "device": jax.devices()[0].device_kind,
        }
        write_whole(directory / CONFIG, json.dumps(content, indent=2) + "\n")


def describe(config: TrainConfig, show: Callable[[str], None]) -> None:
    """Shows every field, a line per group."""
    plain, groups = [], []
    for name, value in config.to_dict().items():
        if isinstance(value, dict):
            groups.append(f"  {name}: " + " ".join(f"{k}={_short(v)}" for k, v in value.items()))
        else:
            plain.append(f"{name}={_short(value)}")
    show(f"config {config.hash}")
    show("  " + " ".join(plain))
    for line in groups:
        show(line)


def _short(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _empty(directory: Path) -> None:
    """Removes what a run writes, and nothing else."""
    for name in (CHECKPOINTS, f"{CHECKPOINTS}-damaged"):
        shutil.rmtree(directory / name, ignore_errors=True)
    for name in (CONFIG, METRICS, PLOT, SAMPLE):
        (directory / name).unlink(missing_ok=True)
