"""Diagnosis: the kind of heterogeneity between clients, and the method that fits. It uses training
data only.
"""

from fedclade.analysis.diagnose.api import Diagnosis, diagnose

__all__ = ["Diagnosis", "diagnose"]
