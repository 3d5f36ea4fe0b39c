# SPDX-License-Identifier: Apache-2.0
"""Named workloads of `selective_scan`, for tests and benchmarks.

Axes: b batch, t sequence, e channels, n d_state, g groups of B and C.
"""

SHAPES = {
    "tiny": {"b": 2, "t": 37, "e": 12, "n": 4, "g": 2},
    "one_token": {"b": 2, "t": 1, "e": 6, "n": 4, "g": 1},
    "wide": {"b": 1, "t": 16, "e": 80_000, "n": 4, "g": 1},
    "many_rows": {"b": 2050, "t": 16, "e": 16, "n": 16, "g": 1},
    "long": {"b": 1, "t": 65_536, "e": 2, "n": 2, "g": 1},
    "small_model": {"b": 4, "t": 512, "e": 512, "n": 16, "g": 1},
    "cpu": {"b": 2, "t": 1024, "e": 1536, "n": 16, "g": 1},
    "mamba1_130m": {"b": 2, "t": 2048, "e": 1536, "n": 16, "g": 1},
    "mamba1_1.4b": {"b": 8, "t": 2048, "e": 4096, "n": 16, "g": 1},
    "mamba1_1.4b_long": {"b": 1, "t": 65_536, "e": 4096, "n": 16, "g": 1},
}
