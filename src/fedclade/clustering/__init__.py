"""Clustering algorithms: pure functions of arrays."""
