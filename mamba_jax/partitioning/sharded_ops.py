# SPDX-License-Identifier: Apache-2.0
"""The operations as the modules call them; the only door to `pallas_kernels`."""

from pallas_kernels import (
    Mamba3State,
    add_layer_norm,
    add_rms_norm,
    causal_conv1d,
    causal_conv1d_update,
    mamba3_scan,
    mamba3_step,
    rms_norm,
    selective_scan,
    selective_state_update,
    ssd,
)

__all__ = [
    "Mamba3State",
    "add_layer_norm",
    "add_rms_norm",
    "causal_conv1d",
    "causal_conv1d_update",
    "mamba3_scan",
    "mamba3_step",
    "rms_norm",
    "selective_scan",
    "selective_state_update",
    "ssd",
]
