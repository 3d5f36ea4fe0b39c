# SPDX-License-Identifier: Apache-2.0
"""Named workloads of `causal_conv1d`, for tests and benchmarks. Axes: b batch, t, e, w taps."""

SHAPES = {
    "tiny": {"b": 2, "t": 11, "e": 8, "w": 4},
    "one_token": {"b": 1, "t": 1, "e": 4, "w": 4},
    "small_model": {"b": 4, "t": 512, "e": 512, "w": 4},
    "mamba1_130m": {"b": 16, "t": 2048, "e": 1536, "w": 4},
    "mamba2_2.7b": {"b": 4, "t": 4096, "e": 5376, "w": 4},
}
