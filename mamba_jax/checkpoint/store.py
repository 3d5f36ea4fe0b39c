# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a run: arrays through Orbax, and beside them the place in the data and the config.

A checkpoint is written to a temporary directory and renamed, so that one that has its final name is
whole. Arrays are stored as plain nested dicts under their names, independent of Flax and optax, and
can be restored onto another mesh. Each array's fingerprint is stored too and compared on restoring:
a checkpoint that fails is moved aside, reported, and the one before it is used.
"""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

PyTree = Any
_ARRAYS, _RECORD = "arrays", "record"


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message is one line."""


@dataclasses.dataclass(frozen=True)
class Restored:
    """What a checkpoint held.

    Attributes:
      step: Its step.
      state: Arrays, in the structure asked for.
      data: State of the data iterator.
      config: The run's config.
    """

    step: int
    state: PyTree
    data: dict
    config: dict


class CheckpointStore:
    """The checkpoints in one directory, a sub-directory per step.

    Args:
      directory: Made when missing.
      keep: Newest checkpoints kept; older ones are deleted.
      read_only: Whether nothing in the directory is changed, so that a run may be writing to it.
      report: Called with a line about each damaged checkpoint.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        keep: int = 3,
        read_only: bool = False,
        report: Callable[[str], None] | None = None,
    ):
        self._directory = Path(directory).absolute()
        self._read_only = read_only
        self._report = report or logging.getLogger(__name__).warning
        if read_only:
            options = ocp.CheckpointManagerOptions(read_only=True)
        else:
            options = ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True)
        self._manager = ocp.CheckpointManager(
            self._directory,
            options=options,
            item_handlers={
                _ARRAYS: ocp.StandardCheckpointHandler(),
                _RECORD: ocp.JsonCheckpointHandler(),
            },
        )

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, ascending."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: PyTree, *, data: dict, config: dict) -> None:
        """Starts writing a checkpoint and returns once the arrays may be changed or donated.

        Args:
          step: Its name; a step that already has a checkpoint is left as it is.
          state: Any pytree of arrays.
          data: JSON-compatible state of the data iterator.
          config: JSON-compatible config of the run.
        """
        if step in self._manager.all_steps():
            return
        arrays = _named(state)
        record = {"data": data, "config": config, "fingerprints": _fingerprints(arrays)}
        save = ocp.args.StandardSave(_nested(arrays)), ocp.args.JsonSave(record)
        items = dict(zip((_ARRAYS, _RECORD), save, strict=True))
        self._manager.save(step, args=ocp.args.Composite(**items), force=True)

    def restore(
        self, like: PyTree, *, config: Mapping | None = None, may_change: Sequence[str] = ()
    ) -> Restored | None:
        """Reads the newest undamaged checkpoint; None when there is none at all.

        Args:
          like: Arrays (or ShapeDtypeStructs with shardings) in the structure to restore.
          config: When given, must equal the checkpoint's, except for the fields of `may_change`.
          may_change: Names of fields, or of groups of fields.

        Raises:
          CheckpointError: the configs differ (each field is named), or every checkpoint is damaged.
        """
        damaged = {}
        for step in reversed(self.steps()):
            try:
                record = self._record(step)
                if config is not None:
                    place = f"{self._directory}/{step}"
                    _require_equal(record["config"], config, may_change, place)
                state = self._arrays(step, like, record["fingerprints"])
            except CheckpointError:
                raise
            except Exception as error:  # whatever reading a damaged file raises
                damaged[step] = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
                continue
            for bad, reason in damaged.items():
                self._put_aside(bad, f"checkpoint {bad} is damaged ({reason}); using {step}")
            return Restored(step, state, record["data"], record["config"])
        if damaged:
            reasons = "; ".join(f"step {step}: {reason}" for step, reason in damaged.items())
            raise CheckpointError(
                f"{self._directory}: wanted a readable checkpoint, got damaged ones ({reasons})"
            )
        return None

    def newest_config(self) -> dict | None:
        """The config inside the newest readable checkpoint; None when there is none."""
        for step in reversed(self.steps()):
            with contextlib.suppress(Exception):  # as above; restore reports it
                return self._record(step)["config"]
        return None

    def reached_preemption(self, step: int) -> bool:
        """Whether some process of the run got SIGTERM; true on all of them at the same step."""
        return self._manager.reached_preemption(step)

    def close(self) -> None:
        """Waits until everything is written."""
        self._manager.wait_until_finished()
        self._manager.close()

    def _record(self, step: int) -> dict:
        args = ocp.args.Composite(**{_RECORD: ocp.args.JsonRestore()})
        record = self._manager.restore(step, args=args)[_RECORD]
        if not {"data", "config", "fingerprints"} <= set(record):
            raise ValueError(f"its record has only {sorted(record)}")
        return record

    def _arrays(self, step: int, like: PyTree, fingerprints: dict) -> PyTree:
        wanted = {name: _abstract(leaf) for name, leaf in _named(like).items()}
        args = ocp.args.Composite(**{_ARRAYS: ocp.args.StandardRestore(_nested(wanted))})
        arrays = _named(self._manager.restore(step, args=args)[_ARRAYS])
        found = _fingerprints(arrays)
        for name in wanted:
            if found[name] != fingerprints.get(name):
                raise ValueError(f"array {name} is not what was written")
        return jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in wanted])

    def _put_aside(self, step: int, line: str) -> None:
        """Moves a damaged checkpoint to a directory beside this one, for its name to be free."""
        if self._read_only:
            self._report(line)
            return
        aside = self._directory.with_name(f"{self._directory.name}-damaged") / str(step)
        self._report(f"{line}; the damaged one is now in {aside.parent}")
        if jax.process_index() == 0:
            aside.parent.mkdir(exist_ok=True)
            number = 1
            while aside.exists():
                aside = aside.with_name(f"{step}-{number}")
                number += 1
            (self._directory / str(step)).rename(aside)
        if jax.process_count() > 1:
            from jax.experimental import multihost_utils

            multihost_utils.sync_global_devices(f"checkpoint {step} put aside")
        self._manager.reload()


def differences(saved: Mapping, wanted: Mapping, may_change: Sequence[str] = ()) -> list[str]:
    """Names the fields in which two nested configs differ, with both values."""
    saved, wanted = _flat(saved), _flat(wanted)
    found = []
    for name in sorted({*saved, *wanted}):
        free = any(name == field or name.startswith(f"{field}.") for field in may_change)
        if not free and saved.get(name) != wanted.get(name):
            found.append(f"{name} ({saved.get(name)!r}, now {wanted.get(name)!r})")
    return found


def _require_equal(saved: Mapping, wanted: Mapping, may_change: Sequence[str], place: str) -> None:
    found = differences(saved, wanted, may_change)
    if found:
        raise CheckpointError(f"{place}: wanted the checkpoint's config, got {', '.join(found)}")


def _flat(values: Mapping, prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def _named(tree: PyTree) -> dict[str, Any]:
    """The leaves by name, parts joined by a slash, in the tree's own order."""
    leaves, _ = jax.tree.flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def _nested(arrays: Mapping[str, Any]) -> dict:
    nested: dict = {}
    for name, array in arrays.items():
        *parents, last = name.split("/")
        node = nested
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = array
    return nested


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None))


def _fingerprints(arrays: Mapping[str, jax.Array]) -> dict[str, int]:
    return {name: int(value) for name, value in jax.device_get(_sums(dict(arrays))).items()}


@jax.jit
def _sums(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """For each array the sum of its bits, each entry times an odd number of its own, modulo 2³².

    Integer sums do not depend on their order, so neither do they on the mesh.
    """

    def total(array):
        width = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[array.dtype.itemsize]
        bits = jax.lax.bitcast_convert_type(array, width).astype(jnp.uint32)
        factor = jnp.ones((), jnp.uint32)
        for axis in range(array.ndim):
            prime = (2654435761, 2246822519, 3266489917)[axis % 3]
            place = jax.lax.broadcasted_iota(jnp.uint32, array.shape, axis)
            factor = factor * (2 * place * jnp.uint32(prime) + 1)
        return jnp.sum(bits * factor, dtype=jnp.uint32)

    return {name: total(array) for name, array in arrays.items()}
