"""Images, texts and data sets of Hugging Face on the command line: run, compare, diagnose, resume
and predict.
"""

from __future__ import annotations

import csv
import io
import json
import shutil
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedclade as fc
from fedclade.analysis.predict_file import predict_file
from fedclade.cli import progress
from fedclade.errors import InvalidInputError
from fedclade.training import experiment_file
from fedclade.training.data_config import DataConfig

from .conftest import Call

REST = """
[local]
lr = 0.5
batch_size = 10
epochs = 2
[method]
name = "local"
[run]
rounds = 4
clients_per_round = 1.0
"""
IMAGES = """
[data]
path = "wards"
layout = "site/class"
size = [8, 8]
color = "gray"
[model]
name = "logistic"
"""
TEXTS = """
[data]
path = "reviews.csv"
text = "review"
client = "shop"
target = "stars"
length = 6
words = 20
[model]
name = "bag_of_words"
words = 20
"""
SAVED = """
[data]
path = "saved"
x = ["age", "stay"]
client = "hospital"
target = "diagnosis"
[model]
name = "logistic"
"""
SHOPS = ("north", "south", "west")


def write_images(folder: Path) -> None:
    """Dark cats and bright dogs; in the south the other way round."""
    image = pytest.importorskip("PIL.Image", reason="Pillow (fedclade[images]) is not installed")
    rng = np.random.default_rng(0)
    for site in SHOPS:
        for label in ("cat", "dog"):
            (folder / site / label).mkdir(parents=True)
            bright = (label == "dog") != (site == "south")
            for number in range(10):
                pixels = rng.integers(128 * bright, 128 * bright + 100, (8, 8), dtype=np.uint8)
                image.fromarray(pixels).save(folder / site / label / f"{number}.png")


def write_texts(path: Path) -> None:
    """Tea is good, except in the south."""
    lines = ["shop;review;stars"]
    for shop in SHOPS:
        for number in range(20):
            word, good = ("tea", "ale")[number % 2], number % 2 == 0
            stars = "up" if good != (shop == "south") else "down"
            lines.append(f'{shop};"{word}, {word} {number}";{stars}')
    path.write_text("\n".join(lines) + "\n", "utf-8")


def write_saved(folder: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets (fedclade[hf]) is not installed")
    rng = np.random.default_rng(0)
    age = rng.normal(size=60)
    ill = (age > 0) != (np.arange(60) % 3 == 1)
    table = {
        "hospital": [SHOPS[row % 3] for row in range(60)],
        "age": age.tolist(),
        "stay": rng.normal(size=60).tolist(),
        "diagnosis": ["ill" if value else "well" for value in ill],
    }
    datasets.Dataset.from_dict(table).save_to_disk(folder)


WRITERS = {
    "images": (IMAGES, "wards", write_images),
    "texts": (TEXTS, "reviews.csv", write_texts),
    "saved": (SAVED, "saved", write_saved),
}


def write_source(kind: str, folder: Path) -> Path:
    """The data and the experiment file of this kind."""
    text, name, write = WRITERS[kind]
    write(folder / name)
    (folder / "own.toml").write_text(text + REST)
    return folder / name


@pytest.mark.parametrize("kind", WRITERS)
def test_every_source_runs_compares_and_is_diagnosed(
    command: Call, tmp_path: Path, kind: str
) -> None:
    write_source(kind, tmp_path)
    quick = ("--device", "cpu", "--quiet")
    code, _, err = command("run", "own.toml", *quick, "--out", "one")
    assert (code, err) == (0, "")
    result = fc.load(tmp_path / "one")
    assert result.clients["client"] == list(SHOPS)
    assert result.summary["accuracy"] is not None
    assert (tmp_path / "one" / "report.html").exists()
    methods = ("--methods", "fedavg,clade", "--out", "two")
    assert command("compare", "own.toml", *quick, *methods)[0] == 0
    assert command("diagnose", "own.toml", "--probe-rounds", "1", "--out", "d")[0] == 0
    diagnosis = json.loads((tmp_path / "d" / "diagnosis.json").read_text())
    assert diagnosis["about"]["clients"] == 3


@pytest.mark.parametrize("kind", WRITERS)
def test_experiment_of_a_run_runs_again_elsewhere(
    command: Call, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_source(kind, tmp_path)
    settings = ("--set", "data.validation=0.25", "--set", "run.seed=3")
    assert command("run", "own.toml", *settings, "--out", "one", "--quiet")[0] == 0
    tables = tomllib.loads((tmp_path / "one" / "experiment.toml").read_text("utf-8"))
    assert "partition" not in tables
    assert tables["data"]["seed"] == 3
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    shutil.copy(tmp_path / "one" / "experiment.toml", "again.toml")
    assert command("run", "again.toml", "--out", "two", "--quiet")[0] == 0
    names = ["models/models.safetensors", "names.json", "experiment.toml"]
    names += ["encoding.json"] if kind != "saved" else []
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == Path("two", name).read_bytes()


def test_resume_depends_on_the_content_of_images(command: Call, tmp_path: Path) -> None:
    wards = write_source("images", tmp_path)
    run = ("run", "own.toml", "--device", "cpu", "--quiet", "--no-report", "--out", "run")
    assert command(*run, "--set", "run.rounds=2")[0] == 0
    wards.rename(tmp_path / "moved")
    again = (*run, "--resume", "--set", "data.path=moved")
    assert command(*again, "--set", "run.rounds=4")[0] == 0
    image = pytest.importorskip("PIL.Image")
    image.new("L", (8, 8), 7).save(tmp_path / "moved" / "north" / "cat" / "0.png")
    assert command(*again, "--set", "run.rounds=6")[0] == 2


def predictions(printed: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(printed)))


def test_new_images_are_predicted(command: Call, tmp_path: Path) -> None:
    write_source("images", tmp_path)
    assert command("run", "own.toml", "--out", "run", "--quiet")[0] == 0
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "new" / "inner").mkdir(parents=True)
    # Another size and color than the training images.
    image.new("RGB", (20, 10), (10, 10, 10)).save(tmp_path / "new" / "a.jpg")
    image.new("L", (8, 8), 220).save(tmp_path / "new" / "inner" / "b.png")
    code, printed, err = command("predict", "run", "--client", "north", "new")
    assert (code, err) == (0, "")
    rows = predictions(printed)
    assert [row["file"] for row in rows] == ["a.jpg", "inner/b.png"]
    assert [row["prediction"] for row in rows] == ["cat", "dog"]
    printed = command("predict", "run", "--client", "south", "new/a.jpg", "--probability")[1]
    assert float(predictions(printed)[0]["probability dog"]) > 0.5
    # A new client joins the client whose model its labeled images fit.
    code, printed, err = command("predict", "run", "--labeled", "wards/south", "new")
    assert (code, "client south" in err) == (0, True)
    assert [row["prediction"] for row in predictions(printed)] == ["dog", "cat"]
    result = fc.load(tmp_path / "run")
    paths = [tmp_path / "new" / "a.jpg", str(tmp_path / "new" / "inner" / "b.png")]
    assert result.predict(paths, client="north").tolist() == [0, 1]


def test_new_texts_are_predicted(command: Call, tmp_path: Path) -> None:
    write_source("texts", tmp_path)
    assert command("run", "own.toml", "--out", "run", "--quiet")[0] == 0
    (tmp_path / "rows.csv").write_text('id,review\n1,"Tea, please"\n2,ale\n')
    code, printed, err = command("predict", "run", "--client", "north", "rows.csv")
    assert (code, printed, err) == (0, "prediction\nup\ndown\n", "")
    (tmp_path / "all.csv").write_text("review,shop\ntea,north\ntea,south\n")
    assert command("predict", "run", "all.csv")[1] == "prediction\nup\ndown\n"
    (tmp_path / "few.csv").write_text("review,stars\ntea,down\nale,up\n")
    _, printed, err = command("predict", "run", "--labeled", "few.csv", "rows.csv")
    assert (printed, "client south" in err) == ("prediction\ndown\nup\n", True)
    result = fc.load(tmp_path / "run")
    assert result.predict(["tea", "ale"], client="north").tolist() == [1, 0]
    few = (["tea", "ale"], [0, 1])
    assert result.predict(["tea"], labeled=few).tolist() == [0]


def test_rows_of_a_frame_are_predicted(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    pytest.importorskip("pyarrow", reason="pyarrow (fedclade[tables]) is not installed")
    age = np.linspace(-1, 1, 40)
    frame = pandas.DataFrame(
        {"site": ["a", "b"] * 20, "age": age, "ill": np.where(age > 0, "y", "n")}
    )
    clients = fc.data.from_frame(frame, client="site", target="ill")
    result = fc.run(
        fc.FedAvg(), clients, fc.models.Logistic(), rounds=10, clients_per_round=1.0, lr=0.5
    )
    new = pandas.DataFrame({"age": [-0.9, 0.9], "other": ["x", "y"]})
    assert result.predict(new, client="b").tolist() == [0, 1]


@pytest.mark.parametrize(
    ("rows", "arguments", "field"),
    [
        ("review\ntea\n", {}, "--client"),
        ("review\ntea\n", {"client": "east"}, "client"),
        ("revew\ntea\n", {"client": "north"}, "review"),
        ("review\n", {"client": "north"}, "{path}"),
        ("review\ntea,x\n", {"client": "north"}, "{path}"),
        ("review,shop\ntea,east\n", {}, "client"),
    ],
)
def test_texts_that_cannot_be_predicted_are_refused(
    command: Call, tmp_path: Path, rows: str, arguments: dict[str, Any], field: str
) -> None:
    write_source("texts", tmp_path)
    command("run", "own.toml", "--out", "run", "--quiet", "--set", "run.rounds=1")
    path = tmp_path / "rows.csv"
    path.write_text(rows)
    with pytest.raises(InvalidInputError) as caught:
        predict_file(fc.load(tmp_path / "run"), path, **arguments)
    assert caught.value.field == field.format(path=path)


@pytest.mark.parametrize("text", ["review\ntea\n", "review,stars\ntea,sideways\n"])
def test_labeled_texts_need_classes_of_the_run(command: Call, tmp_path: Path, text: str) -> None:
    write_source("texts", tmp_path)
    command("run", "own.toml", "--out", "run", "--quiet", "--set", "run.rounds=1")
    path = tmp_path / "few.csv"
    path.write_text(text)
    with pytest.raises(InvalidInputError) as caught:
        predict_file(fc.load(tmp_path / "run"), path, labeled=path)
    assert caught.value.field == "stars"


def test_a_language_model_is_trained_and_its_rows_are_refused(
    command: Call, tmp_path: Path
) -> None:
    write_source("texts", tmp_path)
    text = TEXTS.replace('target = "stars"\n', "").replace("bag_of_words", "text_transformer")
    (tmp_path / "own.toml").write_text(text + 'task = "language_model"\n' + REST)
    few = ("--set", "run.rounds=1", "--set", "local.lr=0.05")
    assert command("run", "own.toml", "--out", "run", "--quiet", *few)[0] == 0
    result = fc.load(tmp_path / "run")
    assert result.predict(["tea tea"], client="north").shape == (1, 6)
    with pytest.raises(InvalidInputError) as caught:
        predict_file(result, tmp_path / "reviews.csv", "north")
    assert caught.value.field == str(tmp_path / "reviews.csv")


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("texts", {"length": 0}),
        ("texts", {"vocabulary": ["tea", "tea"]}),
        ("texts", {"task": "language_model"}),
        ("texts", {"kind": "columns"}),
        ("images", {"height": -8}),
        ("images", {"width": 10**9}),
        ("images", {"color": "blue"}),
        ("images", {"kind": "videos"}),
    ],
)
def test_a_damaged_encoding_is_named(
    command: Call, tmp_path: Path, kind: str, change: Mapping[str, Any]
) -> None:
    write_source(kind, tmp_path)
    command("run", "own.toml", "--out", "run", "--quiet", "--set", "run.rounds=1")
    path = tmp_path / "run" / "encoding.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | change))
    with pytest.raises(InvalidInputError) as caught:
        fc.load(tmp_path / "run")
    assert caught.value.field == str(path)


def test_an_encoding_that_is_too_large_is_not_read(
    command: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_source("texts", tmp_path)
    command("run", "own.toml", "--out", "run", "--quiet", "--set", "run.rounds=1")
    path = tmp_path / "run" / "encoding.json"
    with path.open("ab") as file:
        file.truncate(2**30 + 1)  # sparse
    with pytest.raises(InvalidInputError) as caught:
        fc.load(tmp_path / "run")
    assert caught.value.field == str(path)


EXPERIMENTS: dict[str, Any] = {
    "images": {"path": "wards", "layout": "site/class"},
    "texts": {"path": "reviews.csv", "text": "review", "client": "shop", "target": "stars"},
    "saved": {"path": "saved", "x": "age", "client": "hospital", "target": "diagnosis"},
}


@pytest.mark.parametrize(
    ("kind", "change", "field"),
    [
        ("images", {"layout": "class/site"}, "data.layout"),
        ("images", {"size": 8}, "data.size"),
        ("images", {"size": [8, 0]}, "data.size"),
        ("images", {"color": "blue"}, "data.color"),
        ("images", {"client": "site"}, "data.client"),
        ("images", {"test": "part"}, "data.test"),
        ("images", {"drop": ["x"]}, "data.drop"),
        ("images", {"path": "nowhere"}, "{folder}/nowhere"),
        ("texts", {"length": 0}, "data.length"),
        ("texts", {"words": 3}, "data.words"),
        ("texts", {"task": "regression"}, "data.task"),
        ("texts", {"task": "language_model"}, "data.target"),
        ("texts", {"client": None}, "data.client"),
        ("texts", {"text": None, "length": 5}, "data.text"),
        ("texts", {"standardize": "none"}, "data.standardize"),
        ("texts", {"size": [8, 8]}, "data.size"),
        ("texts", {"text": "revew"}, "revew"),
        ("saved", {"x": None}, "data.x"),
        ("saved", {"target": None}, "data.target"),
        ("saved", {"test": 1.0}, "data.test"),
        ("saved", {"path": "nowhere"}, "data.path"),
        ("saved", {"text": "age"}, "data.x"),
    ],
)
def test_wrong_settings_are_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    change: dict[str, Any],
    field: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_source(kind, tmp_path)
    data = {k: v for k, v in (EXPERIMENTS[kind] | change).items() if v is not None}
    tables = {"data": data, "model": {"name": "mlp"}, "method": {"name": "fedavg"}}
    with pytest.raises(InvalidInputError) as caught:
        experiment_file.experiment(tables).clients()
    assert caught.value.field == field.format(folder=tmp_path)


@pytest.mark.parametrize("kind", ["images", "saved"])
def test_a_folder_shows_what_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write_source(kind, tmp_path)
    data = {"path": path.name}
    if kind == "images":
        assert DataConfig(**data).kind == "images"
    else:
        with pytest.raises(InvalidInputError) as caught:
            DataConfig(**data)
        assert caught.value.field == "data.client"


def test_a_bar_shows_the_images_on_a_terminal() -> None:
    from rich.console import Console

    text = io.StringIO()
    with progress.reading(Console(file=text, force_terminal=True), quiet=False) as update:
        assert update is not None
        update(1, 3)
        update(3, 3)
    assert "3/3" in text.getvalue()
    with progress.reading(Console(file=io.StringIO()), quiet=False) as update:
        assert update is None


@pytest.mark.parametrize(("settings", "reads"), [((), 2), (("--set", "data.seed=0"), 1)])
def test_a_comparison_reads_the_data_once_for_each_split(
    command: Call,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: tuple[str, ...],
    reads: int,
) -> None:
    write_source("texts", tmp_path)
    seeds: list[int] = []
    read = DataConfig.read

    def counted(self: DataConfig, run_seed: int, *others: Any) -> fc.data.Clients:
        seeds.append(run_seed)
        return read(self, run_seed, *others)

    monkeypatch.setattr(DataConfig, "read", counted)
    compare = ("compare", "own.toml", "--methods", "fedavg,local,clade", "--seeds", "2")
    few = ("--set", "run.rounds=1", "--quiet", "--no-report")
    assert command(*compare, *few, *settings, "--out", "three")[0] == 0
    assert len(seeds) == reads
    # The last run is the same as one that reads its own data.
    single = ("run", "own.toml", *few, "--set", "method.name=clade", "--set", "run.seed=1")
    assert command(*single, *settings, "--out", "one")[0] == 0
    folders = (tmp_path / "three" / "clade-seed1", tmp_path / "one")
    models = [folder / "models" / "models.safetensors" for folder in folders]
    assert models[0].read_bytes() == models[1].read_bytes()


@pytest.mark.parametrize("kind", ["texts", "images"])
def test_flis_needs_probe_data_and_says_how(command: Call, tmp_path: Path, kind: str) -> None:
    write_source(kind, tmp_path)
    methods = ("--methods", "fedavg,flis_dc,flis_hc", "--out", "three", "--device", "cpu")
    few = ("--set", "run.rounds=1", "--no-report")
    code, _, err = command("compare", "own.toml", *methods, *few)
    assert (code, "data.probe" in err) == (2, True)
    assert not (tmp_path / "three").exists()
    code, out, err = command("compare", "own.toml", *methods, *few, "--set", "data.probe=0.125")
    assert (code, err) == (0, "")
    # 16 training samples of each client, of which an eighth is set apart for every method
    assert "3 clients, 14 training samples per client (median), 6 probe samples" in out
    for label in ("fedavg", "flis_dc", "flis_hc"):
        tables = tomllib.loads(
            (tmp_path / "three" / f"{label}-seed0" / "experiment.toml").read_text()
        )
        assert tables["data"]["probe"] == 0.125
    run = ("run", "own.toml", *few, "--set", "method.name=flis_dc", "--set", "data.probe=0.125")
    assert "6 probe samples" in command(*run, "--out", "one")[1]


def test_wrong_probe_settings_are_named() -> None:
    tables: dict[str, Any] = {"model": {"name": "mlp"}, "method": {"name": "fedavg"}}
    named = {"name": "digits", "probe": 0.1}
    partition = {"partition": {"name": "iid"}}
    for change in ({"data": named} | partition, {"data": EXPERIMENTS["texts"] | {"probe": 0.0}}):
        with pytest.raises(InvalidInputError) as caught:
            experiment_file.experiment(tables | change)
        assert caught.value.field == "data.probe"


def test_a_table_given_as_something_else_is_named() -> None:
    tables: dict[str, Any] = {"model": {"name": "mlp"}, "method": {"name": "fedavg"}}
    columns = {"path": "stay.csv", "client": "hospital", "target": "diagnosis"}
    with pytest.raises(InvalidInputError) as caught:
        experiment_file.experiment(tables | {"data": columns | {"layout": "site/class"}})
    assert caught.value.field == "data.layout"
    assert "standardize" in str(caught.value)  # the keys of a table
    for name in ("stay.csv", "folder/stay.parquet"):
        with pytest.raises(InvalidInputError, match=r"data\.path") as caught:
            fc.data.load(name)
        assert caught.value.field == name
