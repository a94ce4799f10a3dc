"""The live report of a run: read-only, and served on this machine only."""

from __future__ import annotations

import json
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fedclade.errors import FedcladeError, InvalidInputError

# Rebuild the page at most every _PAUSE times the build time: at most a tenth of the run's time.
_PAUSE = 10
_RECENT = 5.0  # seconds: a page that sent a request within this time is open
_LAST_FETCH = 3.0  # seconds for an open page to fetch the end; it polls every two seconds
_HEADERS = {
    # The page's own policy is stricter, but a page cannot forbid framing.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"
        " blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_NOT_YET = (
    '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh"'
    ' content="2"><meta name="viewport" content="width=device-width, initial-scale=1">'
    "<title>fedclade: a run is being prepared</title><style>:root { color-scheme: light dark; }"
    " body { font: 1.1rem/1.5 system-ui, sans-serif; max-width: 40rem; margin: 0 auto; padding:"
    " 15vh 1.5rem; } h1 { font-size: 1.6rem; }</style></head><body><main><h1>The run is being"
    " prepared</h1><p>fedclade reads the data and builds the models. This page reloads by itself"
    " when the first round has begun.</p></main></body></html>"
)


class Live:
    """A context manager that serves the report of a folder at `address`.

    Args:
        folder: the folder of a run or comparison.
        port: the port on 127.0.0.1; 0 for a free one. A port in use raises `InvalidInputError`.
    """

    def __init__(self, folder: Path, port: int = 0) -> None:
        self.view = View(folder)
        try:
            self._server = _Server(("127.0.0.1", port), _Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise InvalidInputError(
                f"--port {port}: cannot be opened ({reason}). Choose another port, or omit --port"
                " for a free one.",
                "--port",
            ) from error
        self._server.view = self.view
        self.address = f"http://127.0.0.1:{self._server.server_port}/"

    def __enter__(self) -> Self:
        threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="fedclade-live", daemon=True
        ).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.view.finish()
        self._server.shutdown()
        self._server.server_close()


class View:
    """The page of a folder and its data. They are rebuilt only if a file has changed, and rarely
    enough not to slow the run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._stamps: Any = None  # of the files that the data come from
        self._data: dict[str, Any] | None = None
        self._build_seconds = self._built_at = 0.0
        self._last_request = float("-inf")
        self._ended = False
        self._fetched_end = threading.Event()

    def page(self) -> str:
        from fedclade.analysis import report

        data = self._current()
        return _NOT_YET if data is None else report.page(data, live=True)

    def data(self) -> str | None:
        """The data as JSON; None before the first round."""
        self._last_request = time.monotonic()
        ended = self._ended
        data = self._current()
        if ended:
            self._fetched_end.set()
        return None if data is None else json.dumps(data, separators=(",", ":"), allow_nan=False)

    def finish(self) -> None:
        """After the run: wait until an open page has fetched the last state."""
        self._ended = True
        if time.monotonic() - self._last_request < _RECENT:
            self._fetched_end.wait(_LAST_FETCH)

    def _current(self) -> dict[str, Any] | None:
        from fedclade.analysis import report

        with self._lock:
            now, stamps = time.monotonic(), _stamps(self.folder)
            too_early = now - self._built_at < _PAUSE * self._build_seconds and not self._ended
            if stamps == self._stamps or too_early:
                return self._data
            try:
                self._data = report.collect([self.folder])
            except (FedcladeError, OSError):
                return self._data  # no round yet, or a file is being written: keep the old data
            self._stamps, self._built_at = stamps, time.monotonic()
            self._build_seconds = self._built_at - now
            return self._data


def _stamps(folder: Path) -> list[tuple[str, int, int]]:
    """Names, times and sizes of the files in this folder and its subfolders."""
    files = [path for pattern in ("*", "*/*") for path in folder.glob(pattern)]
    return sorted(
        (str(path), stat.st_mtime_ns, stat.st_size)
        for path in files
        if (stat := _stat(path)) is not None
    )


def _stat(path: Path) -> Any:
    try:
        return path.stat()
    except OSError:  # a temporary file that was removed meanwhile
        return None


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    view: View

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing if a browser closes the connection."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = 10
    server_version, sys_version = "fedclade", ""

    def do_GET(self) -> None:
        try:
            self._answer()
        except OSError:  # the browser closed the connection
            raise
        # A defect of the page must neither end the run nor print on its terminal.
        except Exception as error:
            self.send_error(
                HTTPStatus.INTERNAL_SERVER_ERROR,
                f"The page cannot be built ({type(error).__name__}: {error}).",
            )

    def do_HEAD(self) -> None:
        self.do_GET()

    def _answer(self) -> None:
        if (reason := self._rejection_reason()) is not None:
            self.send_error(HTTPStatus.FORBIDDEN, reason)
        elif self.path == "/":
            self._send(HTTPStatus.OK, "text/html", self.server.view.page())
        elif self.path == "/data.json":
            data = self.server.view.data()
            if data is None:
                self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, "The run is being prepared.")
            else:
                self._send(HTTPStatus.OK, "application/json", data)
        else:
            self.send_error(HTTPStatus.NOT_FOUND, "Only / and /data.json exist.")

    def _rejection_reason(self) -> str | None:
        """Why a request is rejected: cross-origin requests and DNS rebinding."""
        port = self.server.server_port
        hosts = {f"{name}:{port}" for name in ("127.0.0.1", "localhost")} | (
            {"127.0.0.1", "localhost"} if port == 80 else set()
        )
        if self.headers.get("Host", "").lower() not in hosts:
            return f"Use 127.0.0.1:{port} or localhost:{port}."
        origin = self.headers.get("Origin")
        if origin is not None and origin.lower() not in {f"http://{host}" for host in hosts}:
            return "Requests from other sites are not allowed."
        if self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
            return "Requests from other sites are not allowed; type the address."
        return None

    def _send(self, status: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        for name, value in {
            **_HEADERS,
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(body)),
        }.items():
            self.send_header(name, value)
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        # The standard library's code for every method that this class does not define.
        if code == HTTPStatus.NOT_IMPLEMENTED:
            code, message = HTTPStatus.METHOD_NOT_ALLOWED, "This page is read-only."
        self._send(code, "text/plain", f"{message or HTTPStatus(code).phrase}\n")

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: the run uses the terminal."""
