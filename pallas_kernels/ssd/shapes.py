# SPDX-License-Identifier: Apache-2.0
"""Named workloads of `ssd`, for tests and benchmarks.

Axes: b batch, t sequence, h heads, p headdim, g groups of B and C, n d_state.
"""

SHAPES = {
    "tiny": {"b": 2, "t": 37, "h": 4, "p": 3, "g": 2, "n": 5},
    "one_token": {"b": 2, "t": 1, "h": 4, "p": 3, "g": 2, "n": 5},
    "blocks": {"b": 2, "t": 83, "h": 4, "p": 3, "g": 2, "n": 5},
    "many_rows": {"b": 2050, "t": 16, "h": 32, "p": 2, "g": 1, "n": 2},
    "long": {"b": 1, "t": 65_536, "h": 1, "p": 2, "g": 1, "n": 2},
    "beyond_2_31": {"b": 17, "t": 16_384, "h": 128, "p": 64, "g": 1, "n": 128},
    "cpu": {"b": 2, "t": 1024, "h": 24, "p": 64, "g": 1, "n": 128},
    "mamba2_130m": {"b": 32, "t": 512, "h": 24, "p": 64, "g": 1, "n": 128},
    "mamba2_1.3b": {"b": 8, "t": 2048, "h": 64, "p": 64, "g": 1, "n": 128},
    "mamba2_2.7b": {"b": 4, "t": 4096, "h": 80, "p": 64, "g": 1, "n": 128},
    "mamba2_1.3b_long": {"b": 1, "t": 65_536, "h": 64, "p": 64, "g": 1, "n": 128},
}
