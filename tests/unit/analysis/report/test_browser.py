"""The page in headless Chromium, from disk: sorting, choosing, pointing and zooming."""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

import fedclade as fc
from fedclade.analysis import report
from fedclade.core.names import Names

from .conftest import cells, planted, train

Open = Callable[..., Any]


def test_a_comparison_is_sorted_by_any_column(pages: dict[str, str], opened: Open) -> None:
    tab = opened(pages["several"])
    accuracy = [
        heading.strip() for heading in tab.locator("#compare-table thead th").all_inner_texts()
    ].index("Accuracy (%)")
    assert (
        tab.locator("#compare-table thead th").nth(accuracy).get_attribute("aria-sort")
        == "descending"
    )  # the best first
    best = settings(tab)
    assert tab.locator("#compare-table tbody tr").first.locator(".mark-best").count() == 1
    heading = tab.locator("#compare-table thead button").nth(accuracy)
    falling = [float(text.split(" ")[0]) for text in cells(tab, "compare-table", accuracy + 1)]
    assert falling == sorted(falling, reverse=True)
    heading.focus()
    tab.keyboard.press("Enter")
    # The focus stays, although the table is redrawn.
    assert heading.evaluate("button => button === document.activeElement")
    sign = "button => getComputedStyle(button, '::after').content"
    assert "▲" in heading.evaluate(sign)
    assert settings(tab) == best[::-1]
    assert [
        float(text.split(" ")[0]) for text in cells(tab, "compare-table", accuracy + 1)
    ] == falling[::-1]
    tab.locator("#compare-table thead button").first.click()
    assert settings(tab) == ["clade_groups", "fedavg"]
    tab.locator("#compare-table thead button").first.click()
    assert settings(tab) == ["fedavg", "clade_groups"]


def settings(tab: Any) -> list[str]:
    """The settings of the comparison, in the order of its table."""
    return list(tab.locator("#compare-table .setting").all_inner_texts())


def test_the_verdict_is_the_headline_and_agrees_with_the_test(
    several: Path, pages: dict[str, str], opened: Open
) -> None:
    data = report.collect([several])
    tab = opened(pages["several"])
    assert tab.locator("h1").inner_text() == data["title"]
    verdict = data["pairs"][0]["verdict"]
    assert ("no difference shown" in data["title"]) == (verdict == "not shown")
    assert ("is better than" in tab.locator("#headline").inner_text()) == (verdict == "real")
    # The forest plot has a row and an interval for the other setting, and a line at the best.
    assert tab.locator("#forest-svg [data-row]").count() == 1
    assert tab.locator("#forest-svg .whisker").count() == 1
    best = data["compared"][0]["label"]
    assert best in tab.locator("#forest-svg text.strong").all_text_contents()
    assert tab.locator("#run-title").inner_text() == f"Run {data['opened']}"
    assert "nearest to their mean" in tab.locator("#run-typical").inner_text()
    tab.locator("#pairs summary").click()
    assert cells(tab, "pairs-table", 1) == [best]


def test_settings_are_folded(pages: dict[str, str], opened: Open) -> None:
    tab = opened(pages["one"])
    assert tab.locator("#settings-body").is_hidden()
    tab.locator("#settings-details summary").click()
    assert "signature_dim" in tab.locator("#settings-body").inner_text()


def test_a_wide_table_has_a_hint_and_keeps_its_first_column(
    pages: dict[str, str], opened: Open
) -> None:
    tab = opened(pages["several"], 390)
    hint = tab.locator("#compare-table .hint")
    hint.wait_for(state="visible")
    left = "tab => document.querySelector('#compare-table tbody th').getBoundingClientRect().left"
    before = tab.evaluate(left)
    tab.evaluate("document.getElementById('compare-table-scroll').scrollLeft = 10000")
    hint.wait_for(state="hidden")
    assert tab.evaluate(left) == before


def test_forty_groups_have_few_colors_and_one_entry_for_the_others(
    tmp_path: Path, opened: Open
) -> None:
    out = train(fc.Local(), planted(40), tmp_path / "local")
    tab = opened(report.write_report([out], tmp_path / "page.html").as_uri())
    assert tab.locator("#map-legend li").all_inner_texts() == ["40 groups"]
    assert tab.locator("#groups-table tbody tr").count() == 12
    tab.get_by_role("button", name="Show more").click()
    assert tab.locator("#groups-table tbody tr").count() == 40
    tab.locator("#group-select").select_option("7")
    assert tab.locator("#map-svg .mark:not(.dim)").count() == 1


def test_the_heat_map_has_a_scale(pages: dict[str, str], opened: Open) -> None:
    tab = opened(pages["one"])
    assert "distance" in tab.locator("#matrix-scale p").inner_text()
    marks = tab.locator("#matrix-scale text").all_text_contents()
    assert marks[0] == "0"
    assert marks[-1].endswith(" or more")


def test_names_on_the_map_do_not_collide(tmp_path: Path, opened: Open) -> None:
    clients = planted(30)
    named = replace(clients, names=Names(clients=tuple(f"hospital {at}" for at in range(30))))
    out = train(fc.CladeGroups(), named, tmp_path / "named")
    tab = opened(report.write_report([out], tmp_path / "page.html").as_uri(), 390)
    boxes = tab.locator("#map-svg text.name").evaluate_all(
        "all => all.map((text) => text.getBBox())"
        ".map(({ x, y, width, height }) => ({ x, y, width, height }))"
    )
    assert len(boxes) >= 4
    for first, second in itertools.combinations(boxes, 2):
        apart = (
            first["x"] + first["width"] <= second["x"] + 1
            or second["x"] + second["width"] <= first["x"] + 1
            or first["y"] + first["height"] <= second["y"] + 1
            or second["y"] + second["height"] <= first["y"] + 1
        )
        assert apart, (first, second)
    assert tab.locator("#tree-svg text.row").count() == 30  # the tree has the name of each
    assert tab.locator("#spread-svg text.row").count() == 30


def test_a_chosen_group_is_highlighted_everywhere(pages: dict[str, str], opened: Open) -> None:
    tab = opened(pages["one"])
    assert tab.locator(".dim").count() == 0
    tab.locator("#groups-table").get_by_role("button", name="group 2").click()
    assert tab.locator("#map-svg .mark:not(.dim)").count() == 6
    assert tab.locator("#map-svg .mark.dim").count() == 18
    assert tab.locator("#learning-groups-svg g[data-series]:not(.dim)").count() == 1
    # Six leaves have five merges.
    assert tab.locator("#tree-svg .trace[data-group='2']:not(.dim)").count() == 5
    assert tab.locator("#spread-svg g[data-row]:not(.dim)").count() == 6
    assert tab.locator("#groups-table tr.chosen").inner_text().split()[:2] == ["group", "2"]
    assert tab.locator("#group-select").input_value() == "2"
    tab.locator("#clients-details summary").click()
    assert cells(tab, "clients-table", 1) == ["2", "6", "10", "14", "18", "22"]
    tab.locator("#group-select").select_option("")
    assert tab.locator(".dim").count() == 0
    assert len(cells(tab, "clients-table", 1)) == 24


def test_pointing_at_a_client_shows_its_labels(pages: dict[str, str], opened: Open) -> None:
    tab = opened(pages["one"])
    mark = tab.locator("#map-svg .mark").first
    mark.scroll_into_view_if_needed()
    box = mark.bounding_box()
    tab.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    tooltip = tab.locator("#tip").inner_text()
    assert "client " in tooltip
    assert "accuracy " in tooltip
    assert "(50 %)" in tooltip
    tab.mouse.move(5, 5)
    assert tab.locator("#tip").is_hidden()


def test_figures_can_be_read_with_the_keyboard(pages: dict[str, str], opened: Open) -> None:
    tab = opened(pages["one"])
    tab.locator("#learning-all-svg").focus()
    tab.keyboard.press("ArrowRight")
    assert tab.locator("#announcement").inner_text().startswith("Round 2")
    tab.keyboard.press("End")
    assert tab.locator("#announcement").inner_text().startswith("Round 4")
    tab.keyboard.press("Escape")
    assert tab.locator("#tip").is_hidden()
    tab.locator("#map-svg").focus()
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("Enter")  # chooses the client's group
    assert tab.locator("#map-svg .mark.dim").count() == 18


def test_the_map_is_zoomed_with_buttons_and_by_dragging(
    pages: dict[str, str], opened: Open
) -> None:
    tab = opened(pages["one"])
    whole = tab.locator("#map-svg").inner_html()
    tab.locator("#map-in").click()
    assert tab.locator("#map-svg").inner_html() != whole
    tab.locator("#map-whole").click()
    assert tab.locator("#map-svg").inner_html() == whole
    box = tab.locator("#map-svg").bounding_box()
    tab.mouse.move(box["x"] + 100, box["y"] + 40)
    tab.mouse.down()
    tab.mouse.move(box["x"] + 300, box["y"] + 200)
    assert tab.locator("#map-svg .brush").get_attribute("visibility") == "visible"
    tab.mouse.up()
    assert tab.locator("#map-svg").inner_html() != whole


def test_gains_are_shown_between_any_two_runs_of_the_same_clients(
    pages: dict[str, str], opened: Open
) -> None:
    tab = opened(pages["several"])
    tab.locator("#gain-new").select_option("clade_groups-seed1")
    assert tab.locator("#gain-old option").all_inner_texts() == ["fedavg-seed1"]
    first = tab.locator("#gain-text").inner_text()
    assert "of 24 clients gain with clade_groups-seed1 over fedavg-seed1" in first
    tab.locator("#gain-new").select_option("fedavg-seed1")
    text = tab.locator("#gain-text").inner_text()
    assert "gain with fedavg-seed1 over clade_groups-seed1" in text
    tab.locator("#run-select").select_option("fedavg-seed0")
    assert tab.locator("#run-title").inner_text() == "Run fedavg-seed0"
    assert tab.locator("#run-headline").inner_text().startswith("One model for all clients")
    assert tab.locator("#group-choice").is_hidden()


def test_a_diagnosis_is_shown(pages: dict[str, str], opened: Open) -> None:
    tab = opened(pages["diagnosis"])
    assert tab.locator("h1").inner_text() == "stay, 4 clients: label skew"
    assert tab.locator("#headline").inner_text() == "Label skew: very sure."
    assert tab.locator("#diagnosis-body > p").all_inner_texts() == ["Use Clade."]
    assert cells(tab, "diagnosis-0-groups", 3) == ["Aalen, Celle, Emden", "1"]
    # A bar for each difference, chance at 1, and a dot with an interval for each pilot run.
    bars = tab.locator("#diagnosis-0-chance-svg rect.mark")
    widths = [float(bar.get_attribute("width")) for bar in bars.all()]
    assert widths[0] == pytest.approx(12.5 * widths[1], rel=1e-3)
    assert tab.locator("#diagnosis-0-pilots-svg .whisker").count() == 1
    assert sorted(tab.locator("#diagnosis-0-map-svg text.name").all_text_contents()) == [
        "Aalen",
        "Bonn",
        "Celle",
    ]  # there is no space for the fourth
    tab.locator("#diagnosis-0-chance-details summary").click()
    assert cells(tab, "diagnosis-0-chance-table", 1)[0] == "labels, p(y)"
    assert cells(tab, "diagnosis-0-chance-table", 4)[0] == "less than 0.1 %"
    assert tab.locator(".command code").all_inner_texts() == [
        "fedclade run 'my federation.toml' --set method.name=clade --set method.recluster_every=5",
        "fedclade compare 'my federation.toml' --methods fedavg,local,clade --seeds 5",
    ]
    tab.locator(".command button").first.click()
    tab.locator(".command button").first.get_by_text(re.compile("Copied|Selected")).wait_for()
    assert tab.locator("#run").is_hidden()
    tab = opened(pages["all"])
    assert tab.locator("#diagnosis .headline").inner_text() == "Label skew: very sure."
    assert tab.locator("#run").is_visible()


def test_text_from_data_stays_text(copied: Path, tmp_path: Path, opened: Open) -> None:
    evil = "<img src=x onerror=alert(1)></script><script>window.evil = 1</script>"
    lines = [json.loads(line) for line in (copied / "rounds.jsonl").read_text().splitlines()]
    lines[0]["failures"] = [{"client": 0, "reason": evil}]
    (copied / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tab = opened(report.write_report([copied], tmp_path / "page.html").as_uri())
    assert cells(tab, "failures-table", 3) == [evil]
    assert tab.evaluate("window.evil === undefined && document.images.length === 0")


def test_a_run_without_a_finished_round_has_a_page(
    copied: Path, tmp_path: Path, opened: Open
) -> None:
    for name in ("summary.json", "client_features.safetensors", "rounds.jsonl"):
        (copied / name).unlink()
    tab = opened(report.write_report([copied], tmp_path / "page.html").as_uri())
    assert tab.locator("#progress-text").inner_text().startswith("Round 0 of 4")
    assert [
        tab.locator(f"#{name}").is_hidden()
        for name in ("learning", "groups", "fairness", "costs", "similarity-plots")
    ] == [True] * 5


def test_a_run_without_accuracy_shows_its_loss(tmp_path: Path, opened: Open) -> None:
    generator = torch.Generator().manual_seed(0)
    arrays = [
        (torch.randn(8, 3, generator=generator) + at, torch.randn(8, generator=generator))
        for at in range(5)
    ]
    clients = fc.data.from_arrays([(x, y, x[:4], y[:4]) for x, y in arrays])
    for method in (fc.FedAvg(), fc.Local()):
        fc.run(
            method,
            clients,
            torch.nn.Linear(3, 1),
            rounds=2,
            out=tmp_path / method.name,
            loss=lambda out, y: (out[:, 0] - y) ** 2,
            eval_every=1,
        )
    tab = opened(report.write_report([tmp_path], tmp_path / "page.html").as_uri())
    assert "Loss" in tab.locator("#compare-table thead").inner_text()
    # The mean client, on test and on training data.
    assert tab.locator("#learning-all-svg .trace").count() == 2
    assert "below the line" in tab.locator("#before-after figcaption").inner_text()
    assert tab.locator("#before-after-svg .mark").count() == 5
    assert tab.locator("#similarity-plots").is_hidden()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder and its address on loopback."""
    folder = tmp_path / "served"
    folder.mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield folder, f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_a_live_page_follows_the_run(copied: Path, served: tuple[Path, str], opened: Open) -> None:
    folder, address = served
    complete = report.collect([copied])
    (copied / "summary.json").unlink()
    lines = (copied / "rounds.jsonl").read_text().splitlines()
    (copied / "rounds.jsonl").write_text("\n".join(lines[:2]) + "\n")
    unfinished = report.collect([copied])
    (folder / "index.html").write_text(report.page(unfinished, live=True))
    (folder / "data.json").write_text(json.dumps(unfinished))
    tab = opened(f"{address}/index.html")
    assert re.match(
        r"Round 2 of 4\. About \d+ s left\.", tab.locator("#progress-text").inner_text()
    )
    assert tab.locator("#progress-bar").evaluate("bar => bar.value") == 0.5
    tab.get_by_text("Live: this page follows the run.").wait_for()
    tab.locator("#learning-groups").get_by_role("button", name="group 1").click()
    (folder / "data.json").write_text(json.dumps(complete))
    tab.get_by_text("Finished: this is the result.").wait_for()
    assert tab.locator("#progress").is_hidden()
    assert tab.locator("#map-svg .mark:not(.dim)").count() == 6  # the choice is kept


def test_names_of_clients_and_classes_are_shown_as_text(opened: Open, tmp_path: Path) -> None:
    names = ["north", "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "Süd"]
    x, y = torch.randn(12, 6, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 2
    clients = fc.data.from_arrays(
        dict.fromkeys(names, (x, y, x[:4], y[:4])), class_names=["<b>cat</b>", "dog"]
    )
    out = tmp_path / "run"
    fc.run(fc.FedAvg(), clients, fc.models.Logistic(), rounds=1, out=out, threads=1)
    tab = opened(report.write_report([out], tmp_path / "names.html").as_uri())
    tab.locator("#clients-details summary").click()
    assert cells(tab, "clients-table", 1) == names
    assert "<b>cat</b> (50 %), dog (50 %)" in tab.locator("#groups-table").inner_text()
    assert ", ".join(names) in tab.locator("#groups-table").inner_text()
    mark = tab.locator("#map-svg .mark").first
    mark.scroll_into_view_if_needed()
    box = mark.bounding_box()
    tab.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    text = tab.locator("#tip").inner_text()
    assert any(f"client {name}," in text for name in names)
    assert "labels <b>cat</b> (50 %)" in text
    assert tab.locator("#run img, #run b").count() == 0
