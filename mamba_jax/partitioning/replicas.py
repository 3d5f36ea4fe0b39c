# SPDX-License-Identifier: Apache-2.0
"""Checks that values which should be equal on several devices are."""

from typing import Any

import jax
import numpy as np


def unequal_replicas(tree: Any) -> dict[str, str]:
    """Compares, bit for bit, the copies that this process's devices hold of every array.

    A sharded array has a copy of each of its parts on every device along the mesh axes that do not
    shard it. A difference means a collective is missing or a device computed something else.

    Args:
      tree: Arrays.

    Returns:
      Path of the array → where the first difference is; empty when all replicas agree.
    """
    report = {}
    for path, array in jax.tree.leaves_with_path(tree):
        first_seen: dict[str, tuple[Any, np.ndarray]] = {}
        for shard in array.addressable_shards:
            value = np.asarray(shard.data)
            device, original = first_seen.setdefault(str(shard.index), (shard.device, value))
            if original.tobytes() != value.tobytes():
                differs = int(np.sum(original != value))
                report.setdefault(
                    jax.tree_util.keystr(path),
                    f"{differs} of {value.size} entries differ between device {device.id} "
                    f"and device {shard.device.id}",
                )
    return report
