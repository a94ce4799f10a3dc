"""The experiment file: what is read, what is refused, and that nothing but a readable message ever
comes out of a bad one.
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
def test_every_preset_is_a_valid_experiment_with_a_line_that_says_what_it_is(name: str) -> None:
    assert experiment(read(name)).run.rounds > 0
    assert len(presets()[name]) > 20


def test_a_file_that_names_the_four_parts_only_gets_the_documented_defaults(tmp_path: Path) -> None:
    file = tmp_path / "my experiment.toml"
    file.write_text(
        '[data]\nname = "digits"\n[partition]\nname = "iid"\n[model]\nname = "mlp"\n[method]\nname'
        ' = "fedavg"\n'
    )
    made = experiment(read(file))
    assert (made.partition.clients, made.partition.probe, made.partition.seed) == (100, None, None)
    assert made.model == fc.models.MLP(200)
    local, run, engine = made.local, made.run, made.engine
    assert (local.lr, local.batch_size, local.epochs) == (0.1, 10, 1)
    assert (local.momentum, local.weight_decay, local.lr_decay) == (0.0, 0.0, 1.0)
    assert (run.rounds, run.clients_per_round, run.seed) == (100, 0.2, 0)
    assert (run.eval_every, run.checkpoint_every, run.fine_tune_epochs) == (10, 10, 0)
    assert (engine.chunk, engine.precision) == (None, "tf32")


def test_set_reads_values_as_toml_and_what_is_not_toml_as_text() -> None:
    made = apply(
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
    assert made == {
        "run": {"rounds": 3, "flag": True},
        "local": {"lr": 0.01},
        "model": {"hidden": [32, 16]},
        "method": {"name": "local"},
        "data": {"name": "a b"},
    }


def test_set_leaves_the_tables_it_was_given_alone_and_the_last_one_wins() -> None:
    tables = read("quickstart")
    before = {name: dict(table) for name, table in tables.items()}
    assert apply(tables, ["run.rounds=3", "run.rounds=4"])["run"]["rounds"] == 4
    assert tables == before


def test_naming_another_partition_drops_the_fields_of_the_first_and_keeps_those_that_all_have() -> (
    None
):
    made = with_sets("partition.name=pathological", "partition.classes_per_client=3")
    assert made.scheme == fc.data.Pathological(3)
    assert made.partition.clients == 40


def test_naming_the_partition_that_is_there_already_keeps_its_fields() -> None:
    assert with_sets("partition.name=label_clusters").scheme == fc.data.LabelClusters(
        clusters=5, classes=2
    )


def test_the_order_of_sets_does_not_matter_for_a_new_partition_and_its_fields() -> None:
    assert with_sets(
        "partition.classes_per_client=3", "partition.name=pathological"
    ).scheme == fc.data.Pathological(3)


def test_a_share_and_a_number_of_clients_stay_apart() -> None:
    share, number = (with_sets(f"run.clients_per_round={value}").run for value in ("1.0", "1"))
    assert isinstance(share.clients_per_round, float)
    assert share.cohort_size(40) == 40
    assert isinstance(number.clients_per_round, int)
    assert number.cohort_size(40) == 1


@pytest.mark.parametrize(
    ("share", "clients", "cohort"), [(0.2, 40, 8), (0.5, 5, 2), (0.001, 40, 1), (1.0, 3, 3)]
)
def test_a_share_of_clients_is_rounded_and_never_nobody(
    share: float, clients: int, cohort: int
) -> None:
    assert with_sets(f"run.clients_per_round={share}").run.cohort_size(clients) == cohort


def test_an_array_in_the_file_becomes_hidden_layers() -> None:
    assert with_sets("model.hidden=[32, 16]").model == fc.models.MLP((32, 16))


def test_the_partition_takes_the_seed_of_the_run_unless_it_has_its_own() -> None:
    first, second, fixed = (
        with_sets("run.seed=1"),
        with_sets("run.seed=2"),
        with_sets("run.seed=2", "partition.seed=1"),
    )
    assert first.clients().train.index.tolist() != second.clients().train.index.tolist()
    assert first.clients().train.index.tolist() == fixed.clients().train.index.tolist()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("run.round=3", ["run.round", "'rounds'"]),
        ("local.learning_rate=1", ["local.learning_rate", "lr"]),
        ("partition.client=3", ["partition.client", "'clients'"]),
        ("partition.cluster=3", ["partition.cluster", "'clusters'"]),
        ("model.hiden=3", ["model.hiden", "'hidden'"]),
        ("method.k=3", ["method.k", "unknown key"]),
        ("method.bound=3", ["method.bound", "unknown key"]),
        ("engine.chunks=3", ["engine.chunks", "'chunk'"]),
        ("data.nam=3", ["data.nam", "'name'"]),
        ("runs.rounds=3", ["[runs]", "'run'"]),
        ("xyz.rounds=3", ["[xyz]", "Known", "partition"]),
        ("method.name=fedvag", ["method.name", "'fedvag'", "'fedavg'"]),
        ("model.name=cnn", ["model.name", "'cnn'"]),
        ("partition.name=label_cluster", ["partition.name", "'label_clusters'"]),
        ("method.name=3", ["method.name", "string"]),
        ("data.name=3", ["data.name", "text"]),
        ("run.rounds=three", ["run.rounds", "'three'", "whole number"]),
        ("run.rounds=2.5", ["run.rounds", "2.5", "whole number"]),
        ("run.rounds=true", ["run.rounds", "whole number"]),
        ('run.rounds="3"', ["run.rounds", "whole number"]),
        ("run.rounds=[3]", ["run.rounds", "whole number"]),
        ("run.rounds=1979-05-27", ["run.rounds", "whole number"]),
        ("run.rounds=", ["run.rounds", "whole number"]),
        ("local.lr=fast", ["local.lr", "number"]),
        ("local.lr=true", ["local.lr", "number"]),
        ("model.hidden=[8, -1]", ["model.hidden", "at least 1"]),
        ("model.hidden=[]", ["model.hidden", "at least 1"]),
        ("run.rounds=0", ["run.rounds = 0", "at least 1"]),
        ("run.rounds=-1", ["run.rounds = -1", "at least 1"]),
        ("run.seed=-1", ["run.seed", "at least 0"]),
        ("run.eval_every=-1", ["run.eval_every", "0"]),
        ("run.checkpoint_every=-1", ["run.checkpoint_every", "0"]),
        ("run.fine_tune_epochs=-1", ["run.fine_tune_epochs", "0"]),
        ("run.clients_per_round=0", ["run.clients_per_round", "share"]),
        ("run.clients_per_round=0.0", ["run.clients_per_round", "share"]),
        ("run.clients_per_round=1.5", ["run.clients_per_round", "share"]),
        ("run.clients_per_round=-2", ["run.clients_per_round", "share"]),
        ("local.lr=0", ["local.lr", "above 0"]),
        ("local.lr=-0.1", ["local.lr", "above 0"]),
        ("local.lr=nan", ["local.lr", "finite"]),
        ("local.lr=inf", ["local.lr", "finite"]),
        ("local.momentum=1", ["local.momentum", "below 1"]),
        ("local.momentum=-0.1", ["local.momentum", "at least 0"]),
        ("local.weight_decay=-1", ["local.weight_decay", "at least 0"]),
        ("local.lr_decay=0", ["local.lr_decay", "above 0"]),
        ("local.lr_decay=1.1", ["local.lr_decay", "at most 1"]),
        ("local.batch_size=0", ["local.batch_size", "at least 1"]),
        ("local.epochs=-3", ["local.epochs", "at least 1"]),
        ("partition.clients=0", ["partition.clients", "at least 1"]),
        ("partition.probe=-1", ["partition.probe", "at least 0"]),
        ("partition.seed=-1", ["partition.seed", "at least 0"]),
        ("partition.clusters=-5", ["partition.clusters", "at least 1"]),
        ("model.hidden=-5", ["model.hidden", "at least 1"]),
        ("model.dropout=1.0", ["model.dropout", "1"]),
        ("model.dropout=nan", ["model.dropout", "finite"]),
        ("engine.precision=float16", ["engine.precision", "'tf32'", "'float32'"]),
        ("run", ["--set run", "table.key=value"]),
        ("run=3", ["--set run=3", "table.key=value"]),
        ("run.rounds", ["--set run.rounds", "table.key=value"]),
        ("run.=3", ["--set run.=3", "table.key=value"]),
    ],
)
def test_a_setting_that_cannot_be_is_refused_with_its_name_and_what_is_allowed(
    given: str, says: list[str]
) -> None:
    with pytest.raises(InvalidInputError) as refused:
        with_sets(given)
    assert "\n" not in str(refused.value)
    for part in says:
        assert part in str(refused.value)


@pytest.mark.parametrize("missing", ["data", "partition", "model", "method"])
def test_a_missing_part_is_named_with_an_example(missing: str) -> None:
    for tables in (
        {name: table for name, table in BASIC.items() if name != missing},
        {**BASIC, missing: {}},
    ):
        with pytest.raises(
            InvalidInputError, match=rf'{missing}\.name: missing.*\[{missing}\] name = "\w+"'
        ):
            experiment(tables)


@pytest.mark.parametrize("table", TABLES)
def test_what_should_be_a_table_and_is_not_is_refused(table: str) -> None:
    for value in (3, "x", [], [{}], None):
        with pytest.raises(InvalidInputError, match=rf"{table} = .*must be a table, \[{table}\]"):
            experiment({**BASIC, table: value})


def test_setting_a_key_of_what_is_no_table_in_the_file_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="run"):
        experiment(apply({**BASIC, "run": 3}, ["run.rounds=2"]))


@pytest.mark.parametrize("text", ["[data", "a = ", "[data]\nname = 'x'\n[data]\n", "\x00"])
def test_a_file_that_is_no_toml_is_refused_with_the_place(tmp_path: Path, text: str) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(text)
    with pytest.raises(
        InvalidInputError, match=r"bad\.toml: not valid TOML: .*(line \d|end of document)"
    ) as refused:
        read(file)
    assert "\n" not in str(refused.value)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidInputError, match=r"bad\.toml: it cannot be read as text"):
        read(file)


def test_an_experiment_from_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(
        fc.InvalidInputError, match="it is a pipe, a socket or a device; put a file there"
    ):
        experiment_file.read(tmp_path / "pipe")


def test_dots_in_a_comment_are_no_key_of_many_parts(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text(f"# {'.' * 300}\n[run]\nrounds = 3\n")
    assert experiment_file.read(file) == {"run": {"rounds": 3}}
    file.write_text(f"[run]\n{'a.' * 300}b = 3\n")
    with pytest.raises(fc.InvalidInputError, match="more than 200 dots in line 2"):
        experiment_file.read(file)


def test_what_is_neither_file_nor_preset_is_refused_with_the_nearest_preset(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidInputError, match=r"'quickstar'.*neither a file nor a preset.*'quickstart'"
    ):
        read("quickstar")
    with pytest.raises(InvalidInputError, match="neither a file nor a preset"):
        read(tmp_path)


# --- anything may stand in an experiment file

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
        "momentum",
        "weight_decay",
        "lr_decay",
        "rounds",
    )
    yield from (
        "clients_per_round",
        "eval_every",
        "checkpoint_every",
        "fine_tune_epochs",
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


def taken_or_refused(make: Callable[[], object]) -> None:
    message = "taken"
    try:
        make()
    except FedcladeError as refused:
        message = str(refused)
    assert message


@settings(max_examples=200, deadline=None)
@given(tables=FILE)
def test_any_tables_at_all_are_taken_or_refused_in_words(tables: dict[str, Any]) -> None:
    taken_or_refused(lambda: experiment(tables))


@settings(max_examples=200, deadline=None)
@given(table=st.sampled_from(TABLES), key=KEYS, value=VALUES)
def test_any_value_of_any_key_of_a_good_file_is_taken_or_refused_in_words(
    table: str, key: str, value: Any
) -> None:
    tables = read("quickstart")
    tables.setdefault(table, {})[key] = value
    taken_or_refused(lambda: experiment(tables))


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
def test_any_set_on_a_good_file_is_taken_or_refused_in_words(sets: list[str]) -> None:
    taken_or_refused(lambda: experiment(apply(read("quickstart"), sets)))


@settings(max_examples=100, deadline=None)
@given(content=st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_any_bytes_as_a_file_are_read_or_refused_in_words(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    file = tmp_path_factory.getbasetemp() / "any.toml"
    file.write_bytes(content)
    taken_or_refused(lambda: experiment(read(file)))


@pytest.mark.parametrize(("old", "new"), experiment_file.RENAMED_KEYS.items())
def test_a_key_of_version_0_1_is_refused_with_its_new_name(old: str, new: str) -> None:
    owners = {"signature_dim": "clade", "noise_ratio": "clade", "recluster_every": "clade"}
    method = owners.get(new.split(".")[1], "flt" if "signature" in new else "ifca")
    with pytest.raises(InvalidInputError) as refused:
        with_sets(f"method.name={method}", f"{old}=1")
    assert str(refused.value).startswith(f"{old}: ")
    assert new in str(refused.value)


def test_every_new_name_is_a_setting() -> None:
    tables = {"server.aggregator=median", "run.max_rejections=2", "engine.threads=1"}
    clade = {"signature_dim=8", "noise_ratio=1.5", "recluster_every=0", "signature_epsilon=1.0"}
    ifca = {"trial_rounds=2", "num_restarts=2", 'shared_layers="trunk"'}
    noise = {"signature_delta=1e-6", "signature_clip=2.0"}
    with_sets("method.name=clade", *tables, *(f"method.{each}" for each in clade | noise))
    with_sets("method.name=ifca", *(f"method.{each}" for each in ifca))
    named = {each.split("=")[0] for each in tables}
    named |= {f"method.{each.split('=')[0]}" for each in clade | noise | ifca}
    assert named == set(experiment_file.RENAMED_KEYS.values())
