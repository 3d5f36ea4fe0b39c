# SPDX-License-Identifier: Apache-2.0
"""What the computation will run on.

Owns the answer to "which device is this traced for", and nothing about operations. `dispatch.py`
asks here; `assume` lets tests, ahead-of-time compilation and `explain` speak about a device that
is not in this machine.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator

import jax


@dataclasses.dataclass(frozen=True)
class Device:
    """A kind of device, as far as the choice of a kernel depends on it.

    Attributes:
      platform: "cpu", "gpu" or "tpu".
      vendor: "nvidia", "amd" or "" where it does not matter.
      kind: The name the driver reports, e.g. "NVIDIA H200".
      compute_capability: (major, minor) of an NVIDIA GPU, else None.
    """

    platform: str
    vendor: str = ""
    kind: str = ""
    compute_capability: tuple[int, int] | None = None

    @property
    def is_hopper(self) -> bool:
        """Whether the Hopper instructions (sm_90a: wgmma, TMA) exist here."""
        return self.vendor == "nvidia" and self.compute_capability == (9, 0)

    def __str__(self) -> str:
        capability = self.compute_capability
        suffix = f" (compute capability {capability[0]}.{capability[1]})" if capability else ""
        return f"{self.kind or self.platform}{suffix}"


CPU = Device("cpu", kind="cpu")

# Mosaic GPU's lowering changes with every minor release of JAX; a release is added here once the
# kernels' tests pass under it.
MOSAIC_JAX = ("0.11",)
H200 = Device("gpu", "nvidia", "NVIDIA H200", (9, 0))

_assumed: contextvars.ContextVar[Device | None] = contextvars.ContextVar("assumed", default=None)


@contextlib.contextmanager
def assume(device: Device) -> Iterator[None]:
    """Traces the enclosed code for `device`, whatever this machine has."""
    token = _assumed.set(device)
    try:
        yield
    finally:
        _assumed.reset(token)


def target_device() -> Device:
    """Returns the device that code traced now will run on.

    In order: an enclosing `assume`; the devices of the ambient mesh; JAX's default device.
    """
    if (assumed := _assumed.get()) is not None:
        return assumed
    mesh = jax.sharding.get_abstract_mesh()
    abstract = getattr(mesh, "abstract_device", None) if not mesh.empty else None
    default = jax.config.jax_default_device
    if isinstance(default, str):
        default = jax.devices(default)[0]
    concrete = default or jax.devices()[0]
    if abstract is not None and abstract.device_kind != concrete.device_kind:
        same_kind = (d for d in jax.devices() if d.device_kind == abstract.device_kind)
        concrete = next(same_kind, concrete)
    return describe(concrete)


def mosaic_refusal(device: Device) -> str | None:
    """Why no Mosaic GPU kernel can run on `device` under this JAX; None if one can."""
    if not device.is_hopper:
        return f"needs a Hopper GPU (compute capability 9.0), not {device}"
    if ".".join(jax.__version__.split(".")[:2]) not in MOSAIC_JAX:
        tested = " and ".join(f"{version}.x" for version in MOSAIC_JAX)
        return f"the kernels are tested with jax {tested}; this is {jax.__version__}"
    return None


def describe(device: jax.Device) -> Device:
    """Translates a JAX device into the facts that choose a kernel."""
    if device.platform in ("gpu", "cuda", "rocm"):
        nvidia = "NVIDIA" in device.device_kind or device.client.platform_version.startswith("cuda")
        capability = getattr(device, "compute_capability", None) if nvidia else None
        major_minor = tuple(int(part) for part in capability.split(".")) if capability else None
        return Device("gpu", "nvidia" if nvidia else "amd", device.device_kind, major_minor)
    return Device(device.platform, kind=device.device_kind)
