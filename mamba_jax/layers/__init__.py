# SPDX-License-Identifier: Apache-2.0
"""Layers that are not state-space mixers: linear maps, convolution, norms, MLP, attention."""
