"""Partitioning: how a data set is divided among clients."""
