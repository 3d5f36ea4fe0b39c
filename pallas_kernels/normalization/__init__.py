# SPDX-License-Identifier: Apache-2.0
"""RMS and layer norms: gated and grouped, and added to a residual stream."""
