"""A run's report while it goes on: served on this machine only, to read only."""

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

# The page is made again after this multiple of the time that it took: at most a tenth of the run.
_SHARE = 10
_RECENT = 5.0  # seconds: a page that asked within them is open
_FAREWELL = 3.0  # seconds that an open page is given to fetch the end of the run; it asks every two
_HEADERS = {
    # What the page itself allows is stricter; a page cannot forbid to be framed.
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
    '<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh"'
    ' content="2"><title>fedclade</title><p>The run is being prepared; this page asks again by'
    " itself.</p></html>"
)


class Live:
    """A context for the time of a run: `address` shows what its folder holds. Entering fails where
    the port is taken.
    """

    def __init__(self, folder: Path, port: int = 0) -> None:
        self.view = View(folder)
        try:
            self._server = _Server(("127.0.0.1", port), _Handler)
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or error
            raise InvalidInputError(
                f"--port {port}: it cannot be opened ({why}); give another, or none for a free one."
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
            self.view.see_off()
        self._server.shutdown()
        self._server.server_close()


class View:
    """The page of a folder and its data. They are made again only if a file has changed, and
    rarely enough not to slow the run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._seen: Any = None
        self._data: dict[str, Any] | None = None
        self._took = self._made = 0.0
        self._query_nodes = float("-inf")
        self._ended = False
        self._fetched_end = threading.Event()

    def page(self) -> str:
        from fedclade.analysis import report

        data = self._current()
        return _NOT_YET if data is None else report.page(data, live=True)

    def data(self) -> str | None:
        """As JSON; None where there is nothing yet."""
        self._query_nodes = time.monotonic()
        ended = self._ended
        data = self._current()
        if ended:
            self._fetched_end.set()
        return None if data is None else json.dumps(data, separators=(",", ":"), allow_nan=False)

    def see_off(self) -> None:
        """The run has ended: let a page that is open fetch its last state."""
        self._ended = True
        if time.monotonic() - self._query_nodes < _RECENT:
            self._fetched_end.wait(_FAREWELL)

    def _current(self) -> dict[str, Any] | None:
        from fedclade.analysis import report

        with self._lock:
            now, found = time.monotonic(), _stamps(self.folder)
            if found == self._seen or (now - self._made < _SHARE * self._took and not self._ended):
                return self._data
            try:
                self._data = report.collect([self.folder])
            except (FedcladeError, OSError):
                return self._data  # no round yet, or a file that is being written: as it was before
            self._seen, self._made = found, time.monotonic()
            self._took = self._made - now
            return self._data


def _stamps(folder: Path) -> list[tuple[str, int, int]]:
    """Names, times and sizes of the files here and one folder below."""
    files = [path for pattern in ("*", "*/*") for path in folder.glob(pattern)]
    return sorted(
        (str(path), found.st_mtime_ns, found.st_size)
        for path in files
        if (found := _stat(path)) is not None
    )


def _stat(path: Path) -> Any:
    try:
        return path.stat()
    except OSError:  # gone in the meantime: a temporary file
        return None


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    view: View

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that closed the connection is no news for the terminal."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = 10
    server_version, sys_version = "fedclade", ""

    def do_GET(self) -> None:
        try:
            self._answer()
        except OSError:  # the browser has gone
            raise
        except (
            Exception
        ) as error:  # a defect of the page must neither end the run nor write over its terminal
            self.send_error(
                HTTPStatus.INTERNAL_SERVER_ERROR,
                f"The page cannot be made ({type(error).__name__}: {error}).",
            )

    def do_HEAD(self) -> None:
        self.do_GET()

    def _answer(self) -> None:
        if (why := self._foreign()) is not None:
            self.send_error(HTTPStatus.FORBIDDEN, why)
        elif self.path == "/":
            self._send(HTTPStatus.OK, "text/html", self.server.view.page())
        elif self.path == "/data.json":
            data = self.server.view.data()
            if data is None:
                self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, "The run is being prepared.")
            else:
                self._send(HTTPStatus.OK, "application/json", data)
        else:
            self.send_error(HTTPStatus.NOT_FOUND, "There is only / and /data.json.")

    def _foreign(self) -> str | None:
        """Why a request is refused: a page of another site must not read this one, under no name
        that it may have given this machine.
        """
        port = self.server.server_port
        hosts = {f"{name}:{port}" for name in ("127.0.0.1", "localhost")} | (
            {"127.0.0.1", "localhost"} if port == 80 else set()
        )
        if self.headers.get("Host", "").lower() not in hosts:
            return f"Ask for 127.0.0.1:{port} or localhost:{port}."
        origin = self.headers.get("Origin")
        if origin is not None and origin.lower() not in {f"http://{host}" for host in hosts}:
            return "Pages of other sites may not ask."
        if self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
            return "Pages of other sites may not ask; type the address."
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
        if (
            code == HTTPStatus.NOT_IMPLEMENTED
        ):  # the standard library's word for every method that is not written above
            code, message = HTTPStatus.METHOD_NOT_ALLOWED, "This page can only be read."
        self._send(code, "text/plain", f"{message or HTTPStatus(code).phrase}\n")

    def log_message(self, format: str, *args: Any) -> None:
        """The terminal belongs to the run."""
