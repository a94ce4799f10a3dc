"""The experiment file: valid content, invalid content, and that any content gives an experiment or
an error of fedclade.
"""

from __future__ import annotations

import datetime
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedclade as fc
from fedclade.errors import FedcladeError, InvalidInputError
from fedclade.registry import REGISTRY
from fedclade.training import experiment_file
from fedclade.training.experiment_file import TABLES, apply, experiment, presets, read

BASIC = {
    "data": {"name": "digits"},
    "partition": {"name": "iid", "clients": 5},
    "model": {"name": "mlp"},
    "method": {"name": "fedavg"},
}


def with_sets(*sets: str) -> experiment_file.Experiment:
    return experiment(apply(read("quickstart"), sets))


@pytest.mark.parametrize("name", sorted(presets()))
def test_every_preset_is_a_valid_experiment_with_a_description(name: str) -> None:
    assert experiment(read(name)).run.rounds > 0
    assert len(presets()[name]) > 20


def test_a_file_with_only_the_four_names_gets_the_documented_defaults(tmp_path: Path) -> None:
    file = tmp_path / "my experiment.toml"
    file.write_text(
        '[data]\nname = "digits"\n[partition]\nname = "iid"\n[model]\nname = "mlp"\n[method]\nname'
        ' = "fedavg"\n'
    )
    parsed = experiment(read(file))
    assert (parsed.partition.clients, parsed.partition.probe, parsed.partition.seed) == (
        100,
        None,
        None,
    )
    assert parsed.model == fc.models.MLP(200)
    local, run, engine = parsed.local, parsed.run, parsed.engine
    assert (local.lr, local.batch_size, local.epochs) == (0.1, 10, 1)
    assert (local.momentum, local.weight_decay, local.decay) == (0.0, 0.0, 1.0)
    assert (run.rounds, run.clients_per_round, run.seed) == (100, 0.2, 0)
    assert (run.eval_every, run.checkpoint_every) == (10, 10)
    assert parsed.personal == fc.PersonalConfig(None, epochs=5, every=0)
    assert (engine.chunk, engine.precision) == (None, "tf32")


def test_set_reads_values_as_toml_or_else_as_text() -> None:
    tables = apply(
        {},
        [
            "run.rounds=3",
            "local.lr=1e-2",
            "model.hidden=[32, 16]",
            "method.name=local",
            'data.name="a b"',
            "run.flag=true",
        ],
    )
    assert tables == {
        "run": {"rounds": 3, "flag": True},
        "local": {"lr": 0.01},
        "model": {"hidden": [32, 16]},
        "method": {"name": "local"},
        "data": {"name": "a b"},
    }


def test_set_does_not_change_its_argument_and_the_last_assignment_wins() -> None:
    tables = read("quickstart")
    before = {name: dict(table) for name, table in tables.items()}
    assert apply(tables, ["run.rounds=3", "run.rounds=4"])["run"]["rounds"] == 4
    assert tables == before


def test_another_partition_drops_the_fields_of_the_first_and_keeps_the_common_ones() -> None:
    changed = with_sets("partition.name=pathological", "partition.classes_per_client=3")
    assert changed.scheme == fc.data.Pathological(3)
    assert changed.partition.clients == 40


def test_the_same_partition_keeps_its_fields() -> None:
    assert with_sets("partition.name=label_clusters").scheme == fc.data.LabelClusters(
        clusters=5, classes=2
    )


def test_the_order_of_sets_does_not_matter_for_a_new_partition_and_its_fields() -> None:
    assert with_sets(
        "partition.classes_per_client=3", "partition.name=pathological"
    ).scheme == fc.data.Pathological(3)


def test_a_float_is_a_fraction_of_the_clients_and_an_int_their_number() -> None:
    share, number = (with_sets(f"run.clients_per_round={value}").run for value in ("1.0", "1"))
    assert isinstance(share.clients_per_round, float)
    assert share.cohort_size(40) == 40
    assert isinstance(number.clients_per_round, int)
    assert number.cohort_size(40) == 1


@pytest.mark.parametrize(
    ("share", "clients", "cohort"), [(0.2, 40, 8), (0.5, 5, 2), (0.001, 40, 1), (1.0, 3, 3)]
)
def test_a_fraction_of_clients_is_rounded_to_at_least_one(
    share: float, clients: int, cohort: int
) -> None:
    assert with_sets(f"run.clients_per_round={share}").run.cohort_size(clients) == cohort


def test_an_array_in_the_file_becomes_hidden_layers() -> None:
    assert with_sets("model.hidden=[32, 16]").model == fc.models.MLP((32, 16))


def test_the_partition_has_the_seed_of_the_run_unless_its_seed_is_set() -> None:
    first, second, fixed = (
        with_sets("run.seed=1"),
        with_sets("run.seed=2"),
        with_sets("run.seed=2", "partition.seed=1"),
    )
    assert first.clients().train.index.tolist() != second.clients().train.index.tolist()
    assert first.clients().train.index.tolist() == fixed.clients().train.index.tolist()


@pytest.mark.parametrize(
    ("assignment", "field", "values"),
    [
        ("run.round=3", "run.round", ["'rounds'"]),
        ("local.learning_rate=1", "local.learning_rate", ["lr"]),
        ("partition.client=3", "partition.client", ["'clients'"]),
        ("partition.cluster=3", "partition.cluster", ["'clusters'"]),
        ("model.hiden=3", "model.hiden", ["'hidden'"]),
        ("method.k=3", "method.k", ["FedAvg"]),
        ("method.bound=3", "method.bound", ["FedAvg"]),
        ("engine.chunks=3", "engine.chunks", ["'chunk'"]),
        ("data.nam=3", "data.nam", ["'name'"]),
        ("runs.rounds=3", "runs", ["[runs]", "'run'"]),
        ("xyz.rounds=3", "xyz", ["[xyz]", *TABLES]),
        ("method.name=fedvag", "method.name", ["'fedvag'", "'fedavg'"]),
        ("model.name=cnm", "model.name", ["'cnm'"]),
        ("partition.name=label_cluster", "partition.name", ["'label_clusters'"]),
        ("method.name=3", "method.name", ["3", "fedavg"]),
        ("data.name=3", "data.name", ["3"]),
        ("run.rounds=three", "run.rounds", ["'three'"]),
        ("run.rounds=2.5", "run.rounds", ["2.5"]),
        ("run.rounds=true", "run.rounds", ["True"]),
        ('run.rounds="3"', "run.rounds", ["'3'"]),
        ("run.rounds=[3]", "run.rounds", ["[3]"]),
        ("run.rounds=1979-05-27", "run.rounds", ["1979-05-27"]),
        ("run.rounds=", "run.rounds", ["''"]),
        ("local.lr=fast", "local.lr", ["'fast'"]),
        ("local.lr=true", "local.lr", ["True"]),
        ("model.hidden=[8, -1]", "model.hidden", ["-1"]),
        ("model.hidden=[]", "model.hidden", ["()"]),
        ("run.rounds=0", "run.rounds", ["0", "1"]),
        ("run.rounds=-1", "run.rounds", ["-1"]),
        ("run.seed=-1", "run.seed", ["-1", "0"]),
        ("run.eval_every=-1", "run.eval_every", ["-1", "0"]),
        ("run.checkpoint_every=-1", "run.checkpoint_every", ["-1", "0"]),
        ("personal.epochs=0", "personal.epochs", ["0", "1"]),
        ("personal.every=-1", "personal.every", ["-1", "0"]),
        ("personal.layer=tune", "personal.layer", ["tune", "finetune", "auto"]),
        ("run.clients_per_round=0", "run.clients_per_round", ["0"]),
        ("run.clients_per_round=0.0", "run.clients_per_round", ["0.0"]),
        ("run.clients_per_round=1.5", "run.clients_per_round", ["1.5"]),
        ("run.clients_per_round=-2", "run.clients_per_round", ["-2"]),
        ("local.lr=0", "local.lr", ["0"]),
        ("local.lr=-0.1", "local.lr", ["-0.1", "0"]),
        ("local.lr=nan", "local.lr", ["nan"]),
        ("local.lr=inf", "local.lr", ["inf"]),
        ("local.momentum=1", "local.momentum", ["1"]),
        ("local.momentum=-0.1", "local.momentum", ["-0.1", "0"]),
        ("local.weight_decay=-1", "local.weight_decay", ["-1", "0"]),
        ("local.decay=0", "local.decay", ["0", "1"]),
        ("local.decay=1.1", "local.decay", ["1.1", "1"]),
        ("local.schedule=linear", "local.schedule", ["linear", "cosine"]),
        ("local.warmup_rounds=-1", "local.warmup_rounds", ["-1", "0"]),
        ("data.validation=1.0", "data.validation", ["1.0", "0"]),
        ("data.validation=-0.1", "data.validation", ["-0.1", "0"]),
        ("data.validation_seed=-1", "data.validation_seed", ["-1", "0"]),
        ("run.patience=-1", "run.patience", ["-1", "0"]),
        ("run.select=first", "run.select", ["first", "best"]),
        ('run.metrics=["auc"]', "run.metrics", ["auc", "auroc"]),
        ("local.batch_size=0", "local.batch_size", ["0", "1"]),
        ("local.epochs=-3", "local.epochs", ["-3", "1"]),
        ("local.steps=-1", "local.steps", ["-1", "0"]),
        ("partition.clients=0", "partition.clients", ["0", "1"]),
        ("partition.probe=-1", "partition.probe", ["-1", "0"]),
        ("partition.seed=-1", "partition.seed", ["-1", "0"]),
        ("partition.clusters=-5", "partition.clusters", ["-5", "1"]),
        ("model.hidden=-5", "model.hidden", ["-5", "1"]),
        ("model.dropout=1.0", "model.dropout", ["1.0"]),
        ("model.dropout=nan", "model.dropout", ["nan"]),
        ("engine.precision=float16", "engine.precision", ["'float16'", "'tf32'", "'float32'"]),
        ("run", "--set", ["--set run:", "table.key=value"]),
        ("run=3", "--set", ["--set run=3", "table.key=value"]),
        ("run.rounds", "--set", ["--set run.rounds", "table.key=value"]),
        ("run.=3", "--set", ["--set run.=3", "table.key=value"]),
    ],
)
def test_the_error_of_an_invalid_setting_has_its_name_and_what_is_allowed(
    assignment: str, field: str, values: list[str]
) -> None:
    with pytest.raises(InvalidInputError) as caught:
        with_sets(assignment)
    assert caught.value.field == field
    assert "\n" not in str(caught.value)
    for value in values:
        assert value in str(caught.value)


@pytest.mark.parametrize("missing", ["data", "partition", "model", "method"])
def test_the_error_of_a_missing_part_has_an_example(missing: str) -> None:
    for tables in (
        {name: table for name, table in BASIC.items() if name != missing},
        {**BASIC, missing: {}},
    ):
        with pytest.raises(InvalidInputError, match=rf'\[{missing}\] name = "\w+"') as caught:
            experiment(tables)
        assert caught.value.field == f"{missing}.name"


@pytest.mark.parametrize("table", TABLES)
def test_a_value_in_place_of_a_table_is_an_error(table: str) -> None:
    for value in (3, "x", [], [{}], None):
        with pytest.raises(InvalidInputError, match=rf"\[{table}\]") as caught:
            experiment({**BASIC, table: value})
        assert caught.value.field == table
        assert repr(value) in str(caught.value)


def test_setting_a_key_of_a_value_that_is_not_a_table_is_an_error() -> None:
    with pytest.raises(InvalidInputError, check=lambda error: error.field == "run"):
        experiment(apply({**BASIC, "run": 3}, ["run.rounds=2"]))


@pytest.mark.parametrize("text", ["[data", "a = ", "[data]\nname = 'x'\n[data]\n", "\x00"])
def test_the_error_of_invalid_toml_has_the_position(tmp_path: Path, text: str) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(text)
    with pytest.raises(InvalidInputError, match=r"(line \d|end of document)") as caught:
        read(file)
    assert caught.value.field == str(file)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_text_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidInputError, match="utf-8", check=lambda e: e.field == str(file)):
        read(file)


def test_reading_a_pipe_is_an_error_and_does_not_block(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(InvalidInputError, check=lambda error: error.field == str(pipe)):
        experiment_file.read(pipe)


def test_dots_in_a_comment_do_not_count_as_a_key(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text(f"# {'.' * 300}\n[run]\nrounds = 3\n")
    assert experiment_file.read(file) == {"run": {"rounds": 3}}
    file.write_text(f"[run]\n{'a.' * 300}b = 3\n")
    with pytest.raises(InvalidInputError, match=r"200.*line 2") as caught:
        experiment_file.read(file)
    assert caught.value.field == str(file)


def test_the_error_of_an_unknown_experiment_has_the_nearest_preset(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="'quickstart'") as caught:
        read("quickstar")
    assert caught.value.field == "quickstar"
    with pytest.raises(InvalidInputError, check=lambda error: error.field == str(tmp_path)):
        read(tmp_path)


# --- experiment files with any content

SCALARS = st.one_of(
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.dates(),
    st.datetimes(),
    st.sampled_from(
        [
            0,
            -1,
            1,
            10**30,
            math.nan,
            math.inf,
            0.0,
            1.0,
            -0.0,
            "digits",
            "",
            "name",
            "iid",
            "tf32",
            datetime.time(1, 2),
        ]
    ),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
)
NAMES = [*(name for things in REGISTRY.values() for name in things)]


def _keys() -> Iterator[str]:
    yield from (
        "name",
        "clients",
        "probe",
        "seed",
        "lr",
        "batch_size",
        "epochs",
        "steps",
        "momentum",
        "weight_decay",
        "decay",
        "rounds",
    )
    yield from (
        "clients_per_round",
        "eval_every",
        "checkpoint_every",
        "layer",
        "chunk",
        "precision",
        "bound",
        "hidden",
    )
    yield from (
        "clusters",
        "classes",
        "overlap",
        "samples",
        "alpha",
        "min_size",
        "classes_per_client",
        "key",
        "dropout",
        "padding",
    )


KEYS = st.sampled_from([*_keys()]) | st.text(max_size=6)
TABLE = st.dictionaries(KEYS, VALUES, max_size=4)
NAMED = st.builds(
    lambda table, name: {**table, "name": name}, TABLE, st.sampled_from(NAMES) | VALUES
)
FILE = st.dictionaries(
    st.sampled_from(TABLES) | st.text(max_size=6), NAMED | TABLE | VALUES, max_size=8
)


def succeeds_or_is_our_error(make: Callable[[], object]) -> None:
    message = "success"
    try:
        make()
    except FedcladeError as error:
        message = str(error)
    assert message


@settings(max_examples=200, deadline=None)
@given(tables=FILE)
def test_any_tables_are_an_experiment_or_an_error_of_ours(tables: dict[str, Any]) -> None:
    succeeds_or_is_our_error(lambda: experiment(tables))


@settings(max_examples=200, deadline=None)
@given(table=st.sampled_from(TABLES), key=KEYS, value=VALUES)
def test_any_value_of_any_key_is_an_experiment_or_an_error_of_ours(
    table: str, key: str, value: Any
) -> None:
    tables = read("quickstart")
    tables.setdefault(table, {})[key] = value
    succeeds_or_is_our_error(lambda: experiment(tables))


@settings(max_examples=200, deadline=None)
@given(
    sets=st.lists(
        st.text(max_size=20)
        | st.builds(
            "{}.{}={}".format,
            st.sampled_from([*TABLES, "", "x"]),
            KEYS,
            VALUES | st.sampled_from(NAMES),
        ),
        max_size=3,
    )
)
def test_any_assignment_is_an_experiment_or_an_error_of_ours(sets: list[str]) -> None:
    succeeds_or_is_our_error(lambda: experiment(apply(read("quickstart"), sets)))


@settings(max_examples=100, deadline=None)
@given(content=st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_any_bytes_are_an_experiment_or_an_error_of_ours(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    file = tmp_path_factory.getbasetemp() / "any.toml"
    file.write_bytes(content)
    succeeds_or_is_our_error(lambda: experiment(read(file)))


@pytest.mark.parametrize(("old", "new"), experiment_file.RENAMED_KEYS.items())
def test_the_error_of_a_key_of_version_0_1_has_its_new_name(old: str, new: str) -> None:
    owners = {"signature_dim": "clade", "noise_ratio": "clade", "recluster_every": "clade"}
    method = owners.get(new.split(".")[1], "flt" if "signature" in new else "ifca")
    with pytest.raises(InvalidInputError, match=new) as caught:
        with_sets(f"method.name={method}", f"{old}=1")
    assert caught.value.field == old


def test_every_new_name_is_a_setting() -> None:
    tables = {"server.aggregator=median", "run.max_rejections=2", "engine.threads=1"}
    tables |= {"personal.epochs=2", "personal.every=1"}
    clade = {"signature_dim=8", "noise_ratio=1.5", "recluster_every=0", "signature_epsilon=1.0"}
    ifca = {"trial_rounds=2", "num_restarts=2", 'shared_layers="trunk"'}
    noise = {"signature_delta=1e-6", "signature_clip=2.0"}
    with_sets("method.name=clade_groups", *tables, *(f"method.{each}" for each in clade | noise))
    with_sets("local.decay=0.9", "local.schedule=exponential")
    with_sets("method.name=ifca", *(f"method.{each}" for each in ifca))
    named = {"local.decay", *(each.split("=")[0] for each in tables)}
    named |= {f"method.{each.split('=')[0]}" for each in clade | noise | ifca}
    new_names = {text.split(",")[0] for text in experiment_file.RENAMED_KEYS.values()}
    assert named == new_names
