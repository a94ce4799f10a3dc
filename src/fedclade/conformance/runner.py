"""Run all checks on a method and report the results."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from fedclade.conformance.checks import CHECKS, Check, ConformanceError, NotApplicableError
from fedclade.conformance.method_run import ENGINES, MethodUnderTest
from fedclade.errors import FedcladeWarning, InvalidInputError
from fedclade.methods.base import Method

Status: TypeAlias = Literal["pass", "FAIL", "n/a"]


@dataclass(frozen=True)
class CheckResult:
    """The result of one check.

    Args:
        check: the check.
        status: whether the method passes; "n/a" if the check does not apply.
        reason: why it fails or does not apply; "" if the method passes.
    """

    check: Check
    status: Status
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.status}  {self.check.name}: {self.reason or self.check.description}"


def check_method(method: Method | type[Method]) -> list[CheckResult]:
    """Check that a method keeps the rules of fedclade: that it can be resumed, works with absent
    and late clients, takes its randomness from `key`, runs on Flower, and so on.

    It runs all checks on small federations, in the simulator and on two nodes in this process. It
    takes seconds. `fedclade check-method FILE` does the same for a file.

    Args:
        method: a method, or a class whose fields all have defaults.

    Returns:
        The result of each check.

    Raises:
        ConformanceError: the method fails one check or more. The message has a line for each.

    Example:
        >>> import fedclade as fc
        >>> fc.check_method(fc.FedAvg())[0].status  # doctest: +SKIP
        'pass'
    """
    results = list(run_checks(method))
    failed = [result for result in results if result.status == "FAIL"]
    if failed:
        lines = "\n".join(f"  {result.check.name}: {result.reason}" for result in failed)
        name = (method if isinstance(method, type) else type(method)).__name__
        raise ConformanceError(
            f"{name} fails {len(failed)} of {len(results)} checks:\n{lines}",
            failed[0].check.name,
        )
    return results


def run_checks(method: Method | type[Method]) -> Iterator[CheckResult]:
    """The result of each check, one by one."""
    under_test = MethodUnderTest(_instance(method))
    for check in CHECKS:
        yield _run_check(check, under_test)


def _instance(method: Method | type[Method]) -> Method:
    if isinstance(method, Method):
        return method
    if not (isinstance(method, type) and issubclass(method, Method)):
        raise InvalidInputError(
            f"method = {method!r}: give a method such as fc.FedAvg(), or its class.", "method"
        )
    try:
        return method()
    except TypeError as error:
        raise InvalidInputError(
            f"{method.__name__}: it cannot be created without arguments ({error}). Give every field"
            " a default, and define init, round and add_clients.",
            "method",
        ) from error


def _run_check(check: Check, method: MethodUnderTest) -> CheckResult:
    """The result on all engines: a failure on one engine is a failure."""
    passed, not_applicable = False, ""
    for engine in ENGINES:
        try:
            with warnings.catch_warnings():
                # Methods warn about federations as small as these.
                warnings.simplefilter("ignore", FedcladeWarning)
                check.run(method.on(engine))
        except NotApplicableError as reason:
            not_applicable = str(reason)
        except ConformanceError as error:
            return CheckResult(check, "FAIL", f"{error} [engine: {engine}]")
        except Exception as error:
            text = " ".join(str(error).split())
            return CheckResult(check, "FAIL", f"{type(error).__name__}: {text} [engine: {engine}]")
        else:
            passed = True
    return CheckResult(check, "pass") if passed else CheckResult(check, "n/a", not_applicable)
