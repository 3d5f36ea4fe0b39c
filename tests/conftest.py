# SPDX-License-Identifier: Apache-2.0
"""Settings of every test: eight CPU devices, full precision, ranks promoted only on purpose."""

import hypothesis
import jax
import pytest

from pallas_kernels import devices

jax.config.update("jax_num_cpu_devices", 8)
# Compiling is most of the suite's time; the passes left out here are LLVM's, not XLA's.
jax.config.update("jax_disable_most_optimizations", True)
jax.config.update("jax_default_matmul_precision", "highest")
jax.config.update("jax_numpy_rank_promotion", "raise")
# The same examples on every run: a rare ill-conditioned draw is found while a test is written.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture
def key():
    """A fixed random key."""
    return jax.random.key(0)


@pytest.fixture(scope="module", autouse=True)
def forget_programs():
    """Programs hold memory maps, of which a process may have 65 530; one more is a crash."""
    yield
    jax.clear_caches()


def pytest_collection_modifyitems(items):
    """Skips, with the reason, GPU tests without a CUDA GPU and kernels under an untested JAX."""
    if (reason := devices.mosaic_refusal(devices.H200)) is not None:
        for item in items:
            if item.path.name.endswith("_mosaic.py"):
                item.add_marker(pytest.mark.skip(reason=reason))
    if jax.default_backend() == "gpu":
        return
    skip = pytest.mark.skip(
        reason=f"needs a CUDA GPU; this process runs on {jax.default_backend()}"
    )
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
