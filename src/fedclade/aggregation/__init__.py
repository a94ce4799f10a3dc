"""Aggregation: how the models of a group are combined into one."""

from fedclade.aggregation.mean import segment_mean, weighted_mean
from fedclade.aggregation.server_optimizer import update_models
from fedclade.core.federation import Aggregator

__all__ = ["Aggregator", "segment_mean", "update_models", "weighted_mean"]
