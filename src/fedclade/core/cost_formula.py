"""Communication costs in bytes as expressions, such as "2*n*W*T"."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping

from fedclade.errors import InvalidInputError

SYMBOLS = {
    "W": "bytes of a model",
    "K": "models that the server has",
    "R": "models that a client trains in a round",
    "G": "bytes of the shared layers",
    "V": "bytes of the trained weights of a model",
    "M": "clients",
    "n": "clients of a round",
    "T": "rounds",
    "E": "bytes of the encoder that is sent",
    "k": "centers of a client",
    "e": "numbers of a center",
    "C": "clusters",
}
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


def evaluate_cost(expression: str, symbols: Mapping[str, int]) -> int:
    """The value of an expression of integers, +, -, *, parentheses and the letters in SYMBOLS.

    Args:
        expression: the expression.
        symbols: the values of the letters.
    """

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.Name) and node.id in SYMBOLS:
            if node.id not in symbols:
                raise InvalidInputError(
                    f"formula '{expression}': this run has no {node.id} ({SYMBOLS[node.id]}).",
                    node.id,
                )
            return symbols[node.id]
        raise ValueError(
            f"formula '{expression}': must be made of whole numbers, +, -, * and the letters"
            f" {', '.join(SYMBOLS)}"
        )

    try:
        return value(ast.parse(expression, mode="eval").body)
    except SyntaxError as error:
        raise ValueError(f"formula '{expression}': {error.msg}") from error
