"""The checks that every method passes, for the methods of fedclade and of its users."""

from fedclade.conformance.checks import CHECKS, Check, ConformanceError, NotApplicableError
from fedclade.conformance.method_run import ENGINES, MethodUnderTest
from fedclade.conformance.runner import CheckResult, check_method, run_checks

__all__ = [
    "CHECKS",
    "ENGINES",
    "Check",
    "CheckResult",
    "ConformanceError",
    "MethodUnderTest",
    "NotApplicableError",
    "check_method",
    "run_checks",
]
