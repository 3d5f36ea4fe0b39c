# SPDX-License-Identifier: Apache-2.0
"""Calls a Triton kernel from JAX through jax-triton, whether 0.3 or 0.4.

jax-triton 0.4 needs Triton 3.7 or later and names the outputs `out_type`; 0.3 runs with Triton 3.6
and names them `out_shape`. Neither is imported before a kernel is asked for.
"""

import importlib.util
import inspect

import jax

from pallas_kernels import devices


def missing(device: devices.Device) -> str | None:
    """Returns why Triton kernels cannot run on `device` here, or None."""
    if device.platform != "gpu":
        return f"Triton kernels are for CUDA and ROCm GPUs, not {device}"
    for package in ("triton", "jax_triton"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed (extra `cuda`)"
    return None


def triton_call(kernel, *arrays, out_type, grid, num_warps: int = 4, **constants) -> list:
    """Launches `kernel` on pointers to `arrays` and to new outputs of `out_type`, in that order."""
    import jax_triton

    parameters = inspect.signature(jax_triton.triton_call).parameters
    outputs = "out_type" if "out_type" in parameters else "out_shape"
    shapes = [jax.ShapeDtypeStruct(out.shape, out.dtype) for out in out_type]
    result = jax_triton.triton_call(
        *arrays, kernel=kernel, grid=grid, num_warps=num_warps, num_stages=1,
        **{outputs: shapes}, **constants,
    )  # fmt: skip
    return list(result)
