# SPDX-License-Identifier: Apache-2.0
"""Chooses the layouts of the SSD kernels by a model of waves of blocks.

Its numbers, times per chunk measured on one H200, lie in `pallas_kernels/tuned/ssd_mosaic.json`. No
choice depends on anything but shapes, so that two runs pick the same kernels.
"""

import importlib.resources
import json
import math

from pallas_kernels.ssd import mosaic_backward, mosaic_forward, mosaic_states
from pallas_kernels.ssd.mosaic_tiles import Q

_MEASURED = json.loads(
    (importlib.resources.files("pallas_kernels") / "tuned" / "ssd_mosaic.json").read_text()
)
PROCESSORS = _MEASURED["processors"]
# Microseconds that a full processor takes for one chunk of each of its heads, by heads at once.
_CHUNK_TIME = {int(heads): time for heads, time in _MEASURED["forward_chunk_us"].items()}
# Microseconds per chunk and head of the pass that finds a segment's last state, on the whole card.
_STATES_TIME = _MEASURED["states_chunk_us"]
_LAUNCH_TIME = _MEASURED["launch_us"]
# A segment shorter than this is not worth its own block.
_SHORTEST_SEGMENT = 256 // Q


def segment_counts(chunks: int) -> list[int]:
    """Ways to cut `chunks` into equal segments that are not too short."""
    most = max(1, min(64, chunks // _SHORTEST_SEGMENT))
    return [s for s in range(1, most + 1) if chunks % s == 0]


def choose_forward(
    b: int, chunks: int, h: int, g: int, gated: bool = False
) -> mosaic_forward.Config:
    """Returns the layout of the forward kernel for b rows of `chunks` chunks of h heads."""
    best = None
    # With the tiles of a gate, three heads do not fit into shared memory.
    for width in (2,) if gated else (2, 3):
        for segments in segment_counts(chunks):
            blocks = b * segments * g * math.ceil(h / g / width)
            waves = math.ceil(blocks / PROCESSORS)
            time = waves * chunks / segments * _CHUNK_TIME[width]
            if segments > 1:
                time += _LAUNCH_TIME + b * chunks * h * _STATES_TIME
            if best is None or time < 0.97 * best[0]:
                best = time, width, segments
    _, width, segments = best
    if width == 2:
        return mosaic_forward.Config(heads=2, segments=segments)
    return mosaic_forward.Config(heads=3, producer=False, together=False, segments=segments)


def choose_states(b: int, chunks: int, h: int, g: int, segments: int) -> mosaic_states.Config:
    """Returns the layout of the states kernel when the sequence is cut into `segments`."""
    return mosaic_states.Config(heads=2, stages=3, segments=segments)


def choose_backward(b: int, chunks: int, h: int, g: int) -> mosaic_backward.Config:
    """Returns the layout of the backward kernel: as few parts as fill the processors evenly."""
    per_group = h // g
    best = None
    for splits in (s for s in range(1, per_group + 1) if per_group % s == 0):
        blocks = b * chunks * g * splits
        # Two heads' time goes into filling the pipeline and writing dB and dC.
        time = math.ceil(blocks / PROCESSORS) * (per_group / splits + 2)
        if best is None or time < 0.97 * best[0]:
            best = time, splits
    return mosaic_backward.Config(splits=best[1])
