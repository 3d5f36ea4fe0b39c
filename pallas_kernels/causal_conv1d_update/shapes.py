# SPDX-License-Identifier: Apache-2.0
"""Named workloads of `causal_conv1d_update`, for tests and benchmarks.

Axes: slots rows of the state array, b batch, k new tokens, l rows of a state, e channels, w taps.
"""

SHAPES = {
    "tiny": {"slots": 5, "b": 3, "k": 2, "l": 4, "e": 6, "w": 4},
    "mamba1_130m_b1": {"slots": 1, "b": 1, "k": 1, "l": 3, "e": 1536, "w": 4},
    "mamba2_2.7b_b1": {"slots": 1, "b": 1, "k": 1, "l": 3, "e": 5376, "w": 4},
    "mamba2_2.7b_b64": {"slots": 64, "b": 64, "k": 1, "l": 3, "e": 5376, "w": 4},
}
