# SPDX-License-Identifier: Apache-2.0
"""Named sizes of `mamba3_step`: those of its tests and of its benchmarks; t counts steps."""

from pallas_kernels.mamba3_scan.shapes import Sizes

BENCHMARKS = {
    "siso_b1_h80": Sizes(b=1, t=1, h=80, p=64, n=128, a=32),
    "siso_b64_h80": Sizes(b=64, t=1, h=80, p=64, n=128, a=32),
    "mimo4_b64_h80": Sizes(b=64, t=1, h=80, p=64, n=128, r=4, a=32),
}

TESTS = {
    "siso": Sizes(b=3, t=5, h=4, p=3, n=10, g=2, a=4),
    "mimo_rank1": Sizes(b=2, t=3, h=2, p=3, n=6, g=1, r=1, a=2),
    "mimo_rank2": Sizes(b=2, t=4, h=4, p=3, n=8, g=2, r=2, a=3),
    "mimo_rank4": Sizes(b=2, t=3, h=4, p=4, n=6, g=4, r=4, a=3),
}
