# SPDX-License-Identifier: Apache-2.0
"""The short causal convolution, a few tokens at a time."""
