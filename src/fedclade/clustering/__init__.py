"""Clustering mathematics: pure functions of arrays."""

from fedclade.clustering.mode_connectivity import Curves, curve_losses

__all__ = ["Curves", "curve_losses"]
