"""The page: one HTML file that holds its data, its style and its script, and needs nothing else."""

from __future__ import annotations

import base64
import hashlib
import json
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

# In the order in which they are joined: each may use what stands before it.
SCRIPTS = (
    "dom.js",
    "state.js",
    "plot.js",
    "charts.js",
    "matrix.js",
    "tree.js",
    "table.js",
    "run.js",
    "compare.js",
    "diagnosis.js",
    "main.js",
)


def page(data: dict[str, Any], live: bool = False) -> str:
    """The whole page. Live, it asks for data.json beside it every two seconds; else it never
    touches the network.
    """
    style, script = (
        _text("style.css"),
        '(() => {\n"use strict";\n' + "\n".join(_text(name) for name in SCRIPTS) + "\n})();",
    )
    environment = Environment(
        loader=PackageLoader("fedclade.analysis.report"), autoescape=True, undefined=StrictUndefined
    )
    return environment.get_template("page.html").render(
        data=data,
        live=live,
        policy=_policy(style, script, live),
        style=Markup(style),
        script=Markup(script),
        json=Markup(embedded(data)),
    )


def embedded(data: dict[str, Any]) -> str:
    """JSON that may stand inside a script element: nothing in it can end the element or begin a
    comment.
    """
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _policy(style: str, script: str, live: bool) -> str:
    """Only this very style and script may act; nothing may be fetched, but the data of a live
    page.
    """
    rules = {
        "default-src": "'none'",
        "script-src": f"'{_hash(script)}'",
        "style-src": f"'{_hash(style)}'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    if live:
        rules["connect-src"] = "'self'"
    return "; ".join(f"{what} {who}" for what, who in rules.items())


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")


def _text(name: str) -> str:
    return (files("fedclade.analysis.report") / "templates" / name).read_text(encoding="utf-8")
