# SPDX-License-Identifier: Apache-2.0
"""The short causal convolution over a sequence."""
