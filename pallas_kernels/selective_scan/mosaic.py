# SPDX-License-Identifier: Apache-2.0
"""`selective_scan` on Hopper: what the Mosaic GPU kernels serve.

segmented.py        how the kernels are put together
mosaic_steps.py     what a lane does for one token, and the sizes
mosaic_layout.py    arrays into the kernels' form and back; where to cut the sequence
mosaic_forward.py   outputs; states of segments
mosaic_backward.py  gradients; cotangents of segments' states
"""

from jaxtyping import Array, Float

from pallas_kernels import devices
from pallas_kernels.selective_scan import mosaic_backward, mosaic_forward, segmented

_KERNELS = segmented.Kernels(
    mosaic_forward.scan,
    mosaic_forward.segment_states,
    mosaic_backward.scan,
    mosaic_backward.segment_carries,
)


def supports(device: devices.Device, arguments: dict) -> str | None:
    """Returns None if the kernels can run this call, else why they cannot."""
    return devices.mosaic_refusal(device) or segmented.refusal(arguments)


def run(*, interpret=None, **arguments) -> tuple[Float[Array, "b t e"], Float[Array, "b e n"]]:
    """See `selective_scan`. `interpret`: parameters of Pallas' GPU interpreter, for tests."""
    return segmented.run(_KERNELS, interpret=interpret, **arguments)
