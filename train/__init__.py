# SPDX-License-Identifier: Apache-2.0
"""Training: `python -m train PRESET`; read train.py first, it is a straight line."""
