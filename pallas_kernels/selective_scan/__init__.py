# SPDX-License-Identifier: Apache-2.0
"""The Mamba-1 recurrence over a sequence."""
