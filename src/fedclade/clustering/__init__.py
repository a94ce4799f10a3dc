"""Clustering mathematics: pure functions of arrays."""
