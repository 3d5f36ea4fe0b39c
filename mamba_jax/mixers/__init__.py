# SPDX-License-Identifier: Apache-2.0
"""The three state-space mixers. Each maps (b, t, d) to (b, t, d), or one token with a cache."""
