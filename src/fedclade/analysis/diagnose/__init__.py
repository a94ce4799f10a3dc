"""Diagnosis: which heterogeneity do these clients have, and which method fits. It sees training
data only.
"""

from fedclade.analysis.diagnose.api import Diagnosis, diagnose

__all__ = ["Diagnosis", "diagnose"]
