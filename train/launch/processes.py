# SPDX-License-Identifier: Apache-2.0
"""Joins the processes of one run when Slurm started several.

The only place of the packages that reads the environment: Slurm has no other way to say which
process this is.
"""

import os

import jax

# What `jax.distributed.initialize` reads, set by srun (not by sbatch alone).
_SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")


def join_processes() -> None:
    """Makes the devices of all tasks of a Slurm step visible; nothing elsewhere.

    Must run before the first use of JAX's devices. One task per GPU: each task takes the GPU of its
    SLURM_LOCALID. When Slurm shows each task a single GPU (--gpus-per-task=1), that one.
    """
    if not all(name in os.environ for name in _SLURM) or os.environ["SLURM_NTASKS"] == "1":
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    single = "SLURM_GPUS_PER_TASK" in os.environ and visible and "," not in visible
    jax.distributed.initialize(local_device_ids=[0] if single else None)
