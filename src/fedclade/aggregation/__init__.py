"""Aggregation: how the models of a group are combined into one."""

from fedclade.core.federation import Aggregator

__all__ = ["Aggregator"]
