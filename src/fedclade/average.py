"""How the models of a group are made one."""

from __future__ import annotations

from typing import Literal, TypeAlias

Average: TypeAlias = Literal["mean", "median", "trimmed_mean", "clipped_mean"]
"""The mean by examples, or one of those that a few bad models cannot spoil (`relatedness.robust`)."""
