"""The live page: who may read it, what it shows, and that it does not change the run."""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import fedclade as fc
from fedclade.analysis import report
from fedclade.analysis.report import live_server
from fedclade.analysis.report.live_server import Live
from fedclade.cli import main, progress, run_monitoring
from fedclade.errors import InvalidInputError

Answer = tuple[int, dict[str, str], str]


def ask(port: int, path: str = "/", method: str = "GET", **headers: str) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, headers=named)
    response = connection.getresponse()
    answer = (
        response.status,
        {name.lower(): value for name, value in response.getheaders()},
        response.read().decode(),
    )
    connection.close()
    return answer


def small_run(folder: Path, rounds: int = 1, **more: Any) -> fc.Result:
    clients = fc.data.partition(fc.data.load("digits"), fc.data.Iid(), clients=4, seed=0)
    return fc.run(
        fc.FedAvg(), clients, model=fc.models.Logistic(), rounds=rounds, out=folder, **more
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("live") / "run"
    small_run(folder)
    return folder


@pytest.fixture(autouse=True)
def _short_last_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_server, "_LAST_FETCH", 0.05)


@pytest.fixture
def port(folder: Path) -> Iterator[int]:
    with Live(folder) as page:
        yield int(page.address.rsplit(":", 1)[1].strip("/"))


def test_the_page_and_its_data(port: int, folder: Path) -> None:
    status, headers, body = ask(port)
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert body == report.page(report.collect([folder]), live=True)
    status, headers, body = ask(port, "/data.json")
    assert (status, headers["content-type"]) == (200, "application/json; charset=utf-8")
    assert json.loads(body) == json.loads(json.dumps(report.collect([folder])))


@pytest.mark.parametrize("path", ["/", "/data.json", "/nowhere"])
def test_every_answer_has_the_security_headers(port: int, path: str) -> None:
    _, headers, _ = ask(port, path)
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "connect-src 'self'" in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert headers["cache-control"] == "no-store"
    assert not [name for name in headers if name.startswith("access-control")]
    assert "Python" not in headers["server"]


def test_head_is_get_without_body(port: int) -> None:
    status, headers, body = ask(port, method="HEAD")
    assert (status, body) == (200, "")
    assert int(headers["content-length"]) == len(ask(port)[2].encode())


@pytest.mark.parametrize(
    "path",
    [
        "/data.json?x=1",
        "/../summary.json",
        "/summary.json",
        "/index.html",
        "/models/models.safetensors",
    ],
)
def test_other_paths_do_not_exist(port: int, path: str) -> None:
    assert ask(port, path)[0] == 404


@pytest.mark.parametrize(
    "method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "WHATEVER"]
)
def test_other_http_methods_are_rejected(port: int, method: str) -> None:
    status, headers, _ = ask(port, method=method)
    assert (status, headers["allow"]) == (405, "GET, HEAD")


def test_only_local_host_names_are_accepted(port: int) -> None:
    for name in (f"127.0.0.1:{port}", f"localhost:{port}", f"LOCALHOST:{port}"):
        assert ask(port, Host=name)[0] == 200
    for name in (
        "evil.example",
        f"evil.example:{port}",
        "127.0.0.1",
        f"127.0.0.1:{port + 1}",
        f"localhost.evil.example:{port}",
        "",
    ):
        status, _, body = ask(port, "/data.json", Host=name)
        assert status == 403, name
        assert f"127.0.0.1:{port}" in body, name


def test_a_request_without_host_is_rejected(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as raw:
        raw.sendall(b"GET /data.json HTTP/1.0\r\n\r\n")
        assert raw.makefile("rb").readline().split()[1] == b"403"


def test_cross_origin_requests_are_rejected(port: int) -> None:
    assert ask(port, Origin=f"http://127.0.0.1:{port}")[0] == 200
    assert ask(port, Sec_Fetch_Site="same-origin")[0] == ask(port, Sec_Fetch_Site="none")[0] == 200
    for origin in (
        "http://evil.example",
        "null",
        f"https://127.0.0.1:{port}",
        f"http://127.0.0.1:{port + 1}",
    ):
        assert ask(port, "/data.json", Origin=origin)[0] == 403, origin
    for fetch_site in ("cross-site", "same-site"):
        assert ask(port, Sec_Fetch_Site=fetch_site)[0] == 403, fetch_site


def test_it_listens_on_loopback_only(folder: Path) -> None:
    page = Live(folder)
    try:
        assert page._server.server_address[0] == "127.0.0.1"
    finally:
        page._server.server_close()


def test_a_port_in_use_is_reported(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        with pytest.raises(
            InvalidInputError, match=rf"--port {number}: .*Address already in use"
        ) as caught:
            Live(folder, number)
        assert caught.value.field == "--port"


def test_before_the_first_round_the_page_reloads(tmp_path: Path) -> None:
    with Live(tmp_path / "not yet") as page:
        number = int(page.address.rsplit(":", 1)[1].strip("/"))
        status, _, body = ask(number)
        assert status == 200
        assert "being prepared" in body
        assert 'http-equiv="refresh"' in body
        assert ask(number, "/data.json")[0] == 503


def test_the_folder_is_read_again_only_if_it_has_changed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = []
    collect = report.collect
    monkeypatch.setattr(
        report, "collect", lambda folders: reads.append(folders) or collect(folders)
    )  # type: ignore[func-returns-value]
    monkeypatch.setattr(live_server, "_PAUSE", 0)
    view = live_server.View(folder)
    first = view.data()
    assert view.data() == first
    view.page()
    assert len(reads) == 1
    os.utime(folder / "rounds.jsonl")
    view.data()
    assert len(reads) == 2


def test_a_slow_page_is_rebuilt_rarely(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, reads = [0.0], []

    def collect(folders: list[Path]) -> dict[str, Any]:
        reads.append(folders)
        now[0] += 1.0  # the build takes a second
        return {"number": len(reads)}

    monkeypatch.setattr(report, "collect", collect)
    monkeypatch.setattr(live_server.time, "monotonic", lambda: now[0])
    view = live_server.View(folder)
    builds = []
    for _ in range(23):
        os.utime(folder / "rounds.jsonl")
        builds.append(json.loads(view.data() or "")["number"])
        now[0] += 1.0
    assert builds == [1] * 10 + [2] * 10 + [3] * 3
    view.finish()  # the end is shown without delay
    os.utime(folder / "rounds.jsonl")
    assert json.loads(view.data() or "")["number"] == 4


def test_a_partly_written_file_does_not_change_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_server, "_PAUSE", 0)
    small_run(tmp_path)
    view = live_server.View(tmp_path)
    before = view.data()
    (tmp_path / "summary.json").write_text("{")
    assert view.data() == before


def test_a_defect_of_the_page_is_shown_only_in_the_browser(
    port: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "page", lambda data, live: 1 / 0)
    status, _, body = ask(port)
    assert status == 500
    assert "ZeroDivisionError" in body
    assert capfd.readouterr() == ("", "")


def test_an_open_page_can_fetch_the_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_server, "_LAST_FETCH", 60)
    view = live_server.View(folder)
    view.data()
    waits = threading.Thread(target=view.finish)
    waits.start()
    while not view._ended:
        time.sleep(0.01)
    view.data()
    waits.join(timeout=10)
    assert not waits.is_alive()
    assert view._fetched_end.is_set()


def test_a_live_run_writes_the_same_bytes_and_stops_the_server(tmp_path: Path) -> None:
    def read_page(number: int) -> None:
        assert ask(number)[0] == 200
        assert ask(number, "/data.json")[0] == 200

    def run(out: str, watched: bool) -> Path:
        with Live(tmp_path / out) as page:
            number = int(page.address.rsplit(":", 1)[1].strip("/"))
            small_run(
                tmp_path / out,
                rounds=3,
                on_round=(lambda row: read_page(number)) if watched else None,
            )
        with pytest.raises(ConnectionRefusedError):
            ask(number)
        return tmp_path / out

    with_page, without = run("with", True), run("without", False)
    for name in ("models/models.safetensors", "clients.csv", "experiment.toml"):
        assert (with_page / name).read_bytes() == (without / name).read_bytes(), name


def test_the_command_prints_the_address_and_serves_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed: list[str] = []
    pages: list[tuple[str, str]] = []

    class Reader:
        """Replaces the progress bar: reads the live page in every round."""

        def __init__(self, *_: object) -> None: ...
        def __enter__(self) -> Reader:
            return self

        def __exit__(self, *_: object) -> None: ...
        def stopping(self) -> None: ...
        def after_round(self, row: dict[str, Any]) -> None:
            (line,) = printed
            address = re.search(r" http://127\.0\.0\.1:(\d+)/$", line)
            assert address
            data = json.loads(ask(int(address[1]), "/data.json")[2])
            pages.append((data["title"], data["runs"][0]["progress"]))

    monkeypatch.setattr(run_monitoring, "print_err", printed.append)
    monkeypatch.setattr(progress, "display", Reader)
    monkeypatch.setattr(live_server, "_PAUSE", 0)
    out = tmp_path / "run"
    outcome = CliRunner().invoke(
        main.app, ["run", "quickstart", "--set", "run.rounds=2", "--out", str(out), "--live", "-q"]
    )
    assert outcome.exception is None
    assert [title for title, _ in pages] == [f"digits: fedavg, round {at} of 2" for at in (1, 2)]
    assert pages[0][1].startswith("Round 1 of 2")
    assert pages[1][1].startswith("Round 2 of 2")
    assert (out / "report.html").exists()


def test_port_needs_live() -> None:
    outcome = CliRunner().invoke(main.app, ["run", "quickstart", "--port", "8000"])
    assert isinstance(outcome.exception, InvalidInputError)
    assert outcome.exception.field == "--port"
    assert "8000" in str(outcome.exception)
    assert "--live" in str(outcome.exception)
