# SPDX-License-Identifier: Apache-2.0
"""Operations of the Mamba family as plain JAX functions: arrays in, arrays out.

Each operation is a folder: `api.py` (the function), `reference.py` (its definition, token by
token), `xla.py` (any device), `mosaic_*.py` and `triton.py` (GPU kernels) where they exist.
"""

from pallas_kernels.dispatch import explain
from pallas_kernels.packing import seq_idx_from_cu_seqlens
from pallas_kernels.selective_scan.api import selective_scan
from pallas_kernels.selective_state_update.api import selective_state_update
from pallas_kernels.ssd.api import ssd

__all__ = [
    "explain",
    "selective_scan",
    "selective_state_update",
    "seq_idx_from_cu_seqlens",
    "ssd",
]
