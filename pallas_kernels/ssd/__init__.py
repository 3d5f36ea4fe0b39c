# SPDX-License-Identifier: Apache-2.0
"""The Mamba-2 recurrence (state-space duality); `api.py` holds the function."""
