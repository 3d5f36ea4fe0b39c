# SPDX-License-Identifier: Apache-2.0
"""Floating-point operations of a training token, and the peaks of known devices: for MFU.

Counted are the operations the model needs, not those an implementation spends: two per weight of a
matrix product (the head's too, the embedding's look-up not), five per channel and state of a scan
(decay, add, input product, output product and sum), and in attention two products over the tokens
before. The backward pass is twice the forward one; recomputation does not count.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax

from mamba_jax.config import MambaConfig

# Dense bf16 peaks without sparsity, FLOP/s, from the vendors' data sheets.
_PEAKS = {
    "H200": 989e12,
    "H100": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
    "MI300X": 1307e12,
}


def flops_per_token(config: MambaConfig, params: Mapping[str, Any], seq_len: int) -> float:
    """Operations of one training token, forward and backward.

    Args:
      config: The model.
      params: Its parameters (arrays or shapes) as a nested dict.
      seq_len: Tokens in a row; matters to attention only.
    """
    leaves, _ = jax.tree.flatten_with_path(params)
    weights = 0
    for path, leaf in leaves:
        if jax.tree_util.keystr(path[-1:], simple=True) == "kernel":
            weights += math.prod(leaf.shape)
    if config.tie_embeddings:
        weights += config.padded_vocab_size * config.d_model
    forward = 2.0 * weights
    for kind, _, count in config.runs:
        if kind == "attention":
            attention = config.attention
            forward += count * 2 * 2 * attention.num_heads * attention.headdim * seq_len / 2
        else:
            mixer = config.mixer
            channels = getattr(mixer, "d_ssm_inner", mixer.d_inner)
            ranks = mixer.rank if kind == "Mamba3" else 1
            forward += count * 5 * channels * mixer.d_state * ranks
    return 3 * forward


def peak_flops_per_s() -> float | None:
    """Peak of all devices together in bf16; None when the device is not in the table."""
    devices = jax.devices()
    for name, peak in _PEAKS.items():
        if name in devices[0].device_kind:
            return peak * len(devices)
    return None
