# SPDX-License-Identifier: Apache-2.0
"""Operations of the Mamba family as plain JAX functions: arrays in, arrays out.

Each operation is a folder: `api.py` (the function), `reference.py` (its definition, token by
token), `xla.py` (any device), `mosaic_*.py` and `triton.py` (GPU kernels) where they exist.
"""

from pallas_kernels.causal_conv1d.api import causal_conv1d
from pallas_kernels.causal_conv1d_update.api import causal_conv1d_update
from pallas_kernels.dispatch import explain
from pallas_kernels.mamba3_scan.api import mamba3_scan
from pallas_kernels.mamba3_scan.state import Mamba3State
from pallas_kernels.mamba3_step.api import mamba3_step
from pallas_kernels.normalization.api import (
    add_layer_norm,
    add_rms_norm,
    layer_norm,
    rms_norm,
)
from pallas_kernels.packing import seq_idx_from_cu_seqlens
from pallas_kernels.selective_scan.api import selective_scan
from pallas_kernels.selective_state_update.api import selective_state_update
from pallas_kernels.ssd.api import ssd

__all__ = [
    "Mamba3State",
    "add_layer_norm",
    "add_rms_norm",
    "causal_conv1d",
    "causal_conv1d_update",
    "explain",
    "layer_norm",
    "mamba3_scan",
    "mamba3_step",
    "rms_norm",
    "selective_scan",
    "selective_state_update",
    "seq_idx_from_cu_seqlens",
    "ssd",
]
