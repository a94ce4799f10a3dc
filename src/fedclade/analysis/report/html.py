"""The page: one HTML file with its data, style and script, and no external resources."""

from __future__ import annotations

import base64
import hashlib
import json
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

# In the order in which they are joined: each may use those before it.
SCRIPTS = (
    "dom.js",
    "state.js",
    "plot.js",
    "charts.js",
    "dots.js",
    "matrix.js",
    "tree.js",
    "table.js",
    "run.js",
    "compare.js",
    "diagnosis.js",
    "main.js",
)


def page(data: dict[str, Any], live: bool = False) -> str:
    """The HTML of the page. A live page fetches data.json every two seconds; any other page makes
    no network request.
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
    """JSON for a script element: nothing in it can end the element or start a comment."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _policy(style: str, script: str, live: bool) -> str:
    """The content security policy: allow only this style and script, and requests only on a live
    page, for its data.
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
    return "; ".join(f"{directive} {source}" for directive, source in rules.items())


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")


def _text(name: str) -> str:
    return (files("fedclade.analysis.report") / "templates" / name).read_text(encoding="utf-8")
