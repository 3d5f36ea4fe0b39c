# SPDX-License-Identifier: Apache-2.0
"""Weights and runs on disk: `store.py` (of a run), `pretrained.py` (of published models)."""
