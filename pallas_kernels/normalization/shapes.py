# SPDX-License-Identifier: Apache-2.0
"""Named workloads of the norms, for tests and benchmarks. Axes: b batch, t, f features."""

GATED = {
    "tiny": {"b": 2, "t": 3, "f": 8, "group_size": 4},
    "small_model": {"b": 4, "t": 512, "f": 512, "group_size": 512},
    "mamba2_130m": {"b": 16, "t": 2048, "f": 1536, "group_size": 1536},
    "mamba2_2.7b": {"b": 4, "t": 4096, "f": 5120, "group_size": 5120},
    "mamba2_2.7b_decode": {"b": 64, "t": 1, "f": 5120, "group_size": 5120},
}
ADDED = {
    "tiny": {"b": 2, "t": 3, "f": 8},
    "small_model": {"b": 4, "t": 512, "f": 256},
    "mamba2_130m": {"b": 16, "t": 2048, "f": 768},
    "mamba2_2.7b": {"b": 4, "t": 4096, "f": 2560},
    "mamba2_2.7b_decode": {"b": 64, "t": 1, "f": 2560},
}
