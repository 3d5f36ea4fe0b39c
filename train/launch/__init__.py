# SPDX-License-Identifier: Apache-2.0
"""Starting a run on a cluster: `slurm.sbatch` to copy and edit, `processes.py` to join hosts."""
