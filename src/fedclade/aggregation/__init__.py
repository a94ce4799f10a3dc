"""Aggregation: how the models of a group become one."""

from fedclade.core.federation import Aggregator

__all__ = ["Aggregator"]
