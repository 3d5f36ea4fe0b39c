# SPDX-License-Identifier: Apache-2.0
"""Weights and runs on disk: `store.py` (a run's checkpoints), `pretrained.py` (published models)."""
