# SPDX-License-Identifier: Apache-2.0
"""Named workloads of `selective_state_update`, for tests and benchmarks.

Axes: b batch, e channels or h heads of p channels, n d_state, g groups of B and C.
"""

PER_CHANNEL = {
    "tiny": {"b": 3, "e": 12, "n": 4, "g": 2},
    "mamba1_130m": {"b": 1, "e": 1536, "n": 16, "g": 1},
    "mamba1_2.8b": {"b": 64, "e": 5120, "n": 16, "g": 1},
}
PER_HEAD = {
    "tiny": {"b": 3, "h": 4, "p": 3, "n": 5, "g": 2},
    "many_programs": {"b": 2050, "h": 32, "p": 4, "n": 4, "g": 1},
    "mamba2_2.7b": {"b": 64, "h": 80, "p": 64, "n": 128, "g": 1},
    "mamba2_2.7b_one": {"b": 1, "h": 80, "p": 64, "n": 128, "g": 1},
}
