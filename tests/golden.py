# SPDX-License-Identifier: Apache-2.0
"""Reads the golden vectors of tests/data/golden (float64 values from independent implementations).

In a case, `inputs`, `outputs`, `cotangents` and `grads` map array names to arrays; `options` holds
the settings. Names are the original's (u, delta, Q, K, V, ...). The scalar whose gradients are
stored is sum over cotangents of sum(cotangent * output).
"""

import dataclasses
import json
from pathlib import Path

import numpy as np

DATA = Path(__file__).parent / "data" / "golden"


@dataclasses.dataclass(frozen=True)
class Case:
    """One golden file, its arrays grouped by role."""

    name: str
    inputs: dict[str, np.ndarray]
    outputs: dict[str, np.ndarray]
    cotangents: dict[str, np.ndarray]
    grads: dict[str, np.ndarray]
    options: dict


def load(name: str) -> Case:
    """Loads `tests/data/golden/<name>.npz`."""
    roles: dict[str, dict[str, np.ndarray]] = {"in": {}, "out": {}, "cot": {}, "grad": {}}
    with np.load(DATA / f"{name}.npz", allow_pickle=False) as file:
        options = json.loads(str(file["options"])) if "options" in file else {}
        for key in file.files:
            role, _, rest = key.partition(".")
            if role in roles:
                roles[role][rest] = file[key]
    return Case(name, roles["in"], roles["out"], roles["cot"], roles["grad"], options)


def names(prefix: str) -> list[str]:
    """Names of the cases whose file begins with `prefix`, sorted."""
    return sorted(path.stem for path in DATA.glob(f"{prefix}*.npz"))


def fill(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """The deterministic fill h(shape, seed) of the specification: float32 in [-1, 1)."""
    mask = np.uint64(0xFFFFFFFF)
    i = np.arange(int(np.prod(shape)), dtype=np.uint64)
    v = (i * np.uint64(2654435761) + np.uint64(seed) * np.uint64(2246822519) + np.uint64(1)) & mask
    v ^= v >> np.uint64(15)
    v = (v * np.uint64(2246822519)) & mask
    v ^= v >> np.uint64(13)
    v = (v * np.uint64(3266489917)) & mask
    v ^= v >> np.uint64(16)
    return (v.astype(np.float64) / 2**31 - 1).astype(np.float32).reshape(shape)
