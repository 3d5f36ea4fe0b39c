# SPDX-License-Identifier: Apache-2.0
"""A run's directory: config.json, metrics.jsonl, checkpoints/, loss.png, sample.txt."""

import json
import platform
import shutil
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import jax

from mamba_jax.checkpoint.store import CheckpointStore
from train import metrics
from train.config import TrainConfig, UserError
from train.files import write_whole

CONFIG, METRICS, CHECKPOINTS = "config.json", "metrics.jsonl", "checkpoints"
PLOT, SAMPLE = "loss.png", "sample.txt"
# There while a run that was stopped by a signal waits to be resumed; the Slurm script looks for it.
STOPPED = "STOPPED"

Show = Callable[[str], None]


def check(config: TrainConfig) -> Path:
    """Returns the run's directory without touching it.

    Raises:
      UserError: it holds a run that is neither to be resumed nor overwritten, or is a file.
    """
    directory = Path(config.directory)
    if directory.exists() and not directory.is_dir():
        raise UserError(f"output: wanted a directory, got {directory} (a file)")
    holds_run = (directory / CONFIG).exists() or (directory / CHECKPOINTS).exists()
    if holds_run and not (config.resume or config.overwrite):
        raise UserError(
            f"output: wanted a new directory, or --resume or --overwrite, got {directory} "
            "(holds a run)"
        )
    return directory


def open_store(config: TrainConfig, show: Show) -> CheckpointStore:
    """Makes the run's directory, emptied of an earlier run with `overwrite`, and its store.

    Raises:
      UserError: the directory cannot be made.
    """
    directory = Path(config.directory)
    if jax.process_index() == 0:
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"output: wanted a directory, got {directory} ({error.strerror})"
            ) from None
        if config.overwrite and not config.resume:
            _empty(directory)
        (directory / STOPPED).unlink(missing_ok=True)
        _save_config(config, directory)
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices("directory")
    return CheckpointStore(directory / CHECKPOINTS, keep=config.checkpoint.keep, report=show)


def finish(config: TrainConfig, signal: str, last: int, show: Show) -> None:
    """Draws the loss curve and says where everything is.

    Args:
      config: The run.
      signal: Name of the signal that stopped it; "" at its end.
      last: Steps taken.
      show: Shows a line.
    """
    directory = Path(config.directory)
    if signal:
        # First: whoever sent the signal may not wait for the curve.
        show(f"stopped by {signal} after step {last}; --resume goes on from there")
        if jax.process_index() == 0:
            write_whole(directory / STOPPED, f"{signal} after step {last}\n")
    if jax.process_index() == 0:
        metrics.plot(directory / METRICS, directory / PLOT, config.name)
    for name, what in (
        (CHECKPOINTS, "checkpoints"),
        (METRICS, "metrics"),
        (PLOT, "loss curve"),
        (SAMPLE, "sample"),
    ):
        if (directory / name).exists():
            show(f"{what}: {directory / name}")


def describe(config: TrainConfig, show: Show) -> None:
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


def _save_config(config: TrainConfig, directory: Path) -> None:
    """Writes the resolved config, its hash and the versions it ran with."""
    versions = {name: version(name) for name in ("jax", "flax", "optax", "numpy")}
    content = {
        "hash": config.hash,
        "config": config.to_dict(),
        "versions": {"python": platform.python_version(), **versions},
        "device": jax.devices()[0].device_kind,
    }
    write_whole(directory / CONFIG, json.dumps(content, indent=2) + "\n")


def _short(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _empty(directory: Path) -> None:
    """Removes what a run writes, and nothing else."""
    for name in (CHECKPOINTS, f"{CHECKPOINTS}-damaged"):
        shutil.rmtree(directory / name, ignore_errors=True)
    for name in (CONFIG, METRICS, PLOT, SAMPLE, STOPPED):
        (directory / name).unlink(missing_ok=True)
