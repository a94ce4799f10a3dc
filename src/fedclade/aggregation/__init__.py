"""Aggregation: how the models of a group are combined into one."""

from fedclade.aggregation.mean import segment_mean, weighted_mean
from fedclade.core.federation import Aggregator

__all__ = ["Aggregator", "segment_mean", "weighted_mean"]
