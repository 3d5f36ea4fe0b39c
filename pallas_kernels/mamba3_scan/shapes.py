# SPDX-License-Identifier: Apache-2.0
"""Named sizes of `mamba3_scan`: those of its tests and of its benchmarks. Ranks of 1 are SISO."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Sizes:
    """b batch, t sequence, h heads, p headdim, n d_state, g groups, r ranks, a rotation angles."""

    b: int
    t: int
    h: int
    p: int
    n: int
    g: int = 1
    r: int = 1
    a: int = 1


BENCHMARKS = {
    "siso_b8_t2048_h32": Sizes(b=8, t=2048, h=32, p=64, n=128, a=32),
    "siso_b4_t4096_h64": Sizes(b=4, t=4096, h=64, p=64, n=128, a=32),
    "siso_b1_t65536_h32": Sizes(b=1, t=65536, h=32, p=64, n=128, a=32),
    "mimo4_b8_t2048_h32": Sizes(b=8, t=2048, h=32, p=64, n=128, r=4, a=32),
    "cpu_siso_b2_t1024_h24": Sizes(b=2, t=1024, h=24, p=64, n=128, a=32),
}

# Off every special case at once: 1 < g < h, several ragged chunks, channels that do not turn.
TESTS = {
    "siso": Sizes(b=2, t=37, h=4, p=3, n=10, g=2, a=4),
    "siso_one_token": Sizes(b=2, t=1, h=2, p=3, n=4, g=1, a=2),
    "siso_group_per_head": Sizes(b=1, t=19, h=3, p=2, n=6, g=3, a=2),
    "mimo_rank1": Sizes(b=2, t=23, h=2, p=3, n=6, g=1, r=1, a=2),
    "mimo_rank2": Sizes(b=2, t=37, h=4, p=3, n=8, g=2, r=2, a=3),
    "mimo_rank4": Sizes(b=1, t=21, h=2, p=4, n=6, g=2, r=4, a=3),
    # A norm over very few channels magnifies the rounding of what it normalises.
    "mimo_bf16": Sizes(b=1, t=40, h=4, p=16, n=32, g=2, r=4, a=8),
}
