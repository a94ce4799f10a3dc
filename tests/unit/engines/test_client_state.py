"""Client state: later calls of a round read it, only a commit makes it permanent, and a checkpoint
restores it unchanged.
"""

from __future__ import annotations

import copy
import errno
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from torch import Tensor

from fedclade.core.program import TEMPORARY
from fedclade.core.pytree import Tree
from fedclade.engines.client_state import ClientStateStore
from fedclade.engines.state_rows import RowsInMemory
from fedclade.errors import FedcladeError, InvalidInputError, WriteError

CLIENTS = 9
EVERYONE = torch.arange(CLIENTS)


def initial() -> Tree:
    return {"w": torch.tensor([1.0, 2.0]), "count": torch.tensor(7)}


def rows(numbers: list[int]) -> Tree:
    """A row of state for each number; both tensors depend on it."""
    n = torch.tensor(numbers)
    return {"w": torch.stack([n.float(), -n.float()], 1), "count": n}


def counts(state: ClientStateStore, ids: Tensor = EVERYONE) -> list[int]:
    """The clients' states, as the numbers from which `rows` made them; 7 is the initial row."""
    read = state.read(ids)
    for w, count in zip(read["w"].tolist(), read["count"].tolist(), strict=True):
        assert w == ([1.0, 2.0] if count == 7 else [count, -count])
    return [int(count) for count in read["count"]]


some_clients = st.lists(st.integers(0, CLIENTS - 1), min_size=1, max_size=CLIENTS, unique=True)


class ClientStateMachine(RuleBasedStateMachine):
    """Any sequence of writes, commits, rollbacks and restores, compared with a plain dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.state = ClientStateStore(initial(), CLIENTS)
        self.committed: dict[int, int] = {}
        self.pending: dict[int, int] = {}
        self.version = 0
        self.written = 7  # the number of the latest row; every row has a new number

    @rule(ids=some_clients)
    def write(self, ids: list[int]) -> None:
        numbers = list(range(self.written + 1, self.written + 1 + len(ids)))
        self.written += len(ids)
        self.state.write(torch.tensor(ids), rows(numbers))
        self.pending |= dict(zip(ids, numbers, strict=True))

    @rule()
    def commit(self) -> None:
        self.version += 1
        self.state.commit(self.version)
        self.committed |= self.pending
        self.pending = {}

    @rule()
    def rollback(self) -> None:
        self.state.rollback()
        self.pending = {}

    @rule()
    def through_a_checkpoint(self) -> None:
        saved = copy.deepcopy(self.state.tensors())
        self.state = ClientStateStore(initial(), CLIENTS)
        self.state.restore(saved, self.version)
        self.pending = {}

    @rule(ids=some_clients)
    def read_some(self, ids: list[int]) -> None:
        expected = self.committed | self.pending
        assert counts(self.state, torch.tensor(ids)) == [expected.get(client, 7) for client in ids]

    @invariant()
    def reads_return_the_latest_writes(self) -> None:
        expected = self.committed | self.pending
        assert counts(self.state) == [expected.get(client, 7) for client in range(CLIENTS)]
        assert self.state.version == self.version

    @invariant()
    def a_checkpoint_holds_exactly_the_committed_rows(self) -> None:
        saved = self.state.tensors()
        assert (
            dict(zip(saved["ids"].tolist(), saved["rows/count"].tolist(), strict=True))
            == self.committed
        )
        assert saved["rows/w"].shape == (len(self.committed), 2)


class OnDisk(ClientStateMachine):
    """The same with rows in a file, and with the death of the process."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.state = ClientStateStore(initial(), CLIENTS, Path(self.folder.name))
        self.state.commit(0)

    @rule()
    def through_a_checkpoint(self) -> None:
        self.state.restore(copy.deepcopy(self.state.tensors()), self.version)
        self.pending = {}

    @rule()
    def the_process_dies(self) -> None:
        self.state = ClientStateStore(initial(), CLIENTS, Path(self.folder.name), self.version)
        self.pending = {}

    def teardown(self) -> None:
        self.folder.cleanup()


TestAnySequence = ClientStateMachine.TestCase
TestAnySequence.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
TestAnySequenceOnDisk = OnDisk.TestCase
TestAnySequenceOnDisk.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)


def test_a_client_that_never_wrote_has_the_initial_client_state() -> None:
    state = ClientStateStore(initial(), CLIENTS)
    state.write(torch.tensor([4]), rows([50]))
    state.commit(1)
    assert counts(state) == [7, 7, 7, 7, 50, 7, 7, 7, 7]


def test_a_repeated_round_does_not_advance_client_state_twice() -> None:
    state = ClientStateStore(initial(), CLIENTS)
    for _ in range(3):  # the server is killed after the write, three times
        read = state.read(torch.tensor([2]))
        state.write(torch.tensor([2]), {"w": read["w"], "count": read["count"] + 1})
        state.rollback()
    read = state.read(torch.tensor([2]))
    state.write(torch.tensor([2]), {"w": read["w"], "count": read["count"] + 1})
    state.commit(1)
    assert int(state.read(torch.tensor([2]))["count"][0]) == 8
    state.rollback()  # nothing to roll back after a commit
    assert int(state.read(torch.tensor([2]))["count"][0]) == 8


def test_later_calls_of_a_round_read_its_writes_and_a_checkpoint_does_not() -> None:
    state = ClientStateStore(initial(), CLIENTS)
    state.write(torch.tensor([1, 3]), rows([10, 30]))
    assert counts(state, torch.tensor([3, 0, 1])) == [30, 7, 10]
    assert len(state.tensors()["ids"]) == 0


@pytest.mark.parametrize("declared", [initial(), {}], ids=["state", "no state"])
def test_temporary_state_needs_no_declaration_and_ends_with_the_transaction(declared: Tree) -> None:
    state, name = ClientStateStore(declared, CLIENTS), f"{TEMPORARY}/score"
    temporary = {name: torch.tensor([[1.0, 2.0], [3.0, 4.0]])}
    for end in (state.rollback, lambda: state.commit(1)):
        state.write(torch.tensor([3, 1]), temporary)
        assert state.read(torch.tensor([1, 3, 0]))[name].tolist() == [[3, 4], [1, 2], [0, 0]]
        assert name not in state.tensors()
        end()
        assert state.read(EVERYONE).keys() == declared.keys()
    if declared:
        state.write(torch.tensor([3]), rows([30]) | {name: torch.ones(1, 2)})
        assert counts(state, torch.tensor([3, 1])) == [30, 7]
    node = ClientStateStore(declared, CLIENTS)
    state.write(torch.tensor([3, 1]), temporary)
    node.restore(state.tensors() | state.temporary, 0)
    assert torch.equal(node.read(EVERYONE)[name], state.read(EVERYONE)[name])
    node.restore(state.tensors(), 0)
    assert node.read(EVERYONE).keys() == declared.keys()


def test_changing_tensors_that_were_read_does_not_change_client_state() -> None:
    state = ClientStateStore(initial(), CLIENTS)
    state.write(torch.tensor([0]), rows([10]))
    state.commit(1)
    state.write(torch.tensor([1]), rows([20]))
    state.read(EVERYONE)["count"].zero_()
    state.read(EVERYONE)["w"].zero_()
    assert counts(state) == [10, 20, *[7] * 7]


def test_changing_tensors_that_were_written_does_not_change_client_state() -> None:
    state = ClientStateStore(initial(), CLIENTS)
    written = rows([10])
    state.write(torch.tensor([0]), written)
    written["count"].zero_()
    assert counts(state, torch.tensor([0])) == [10]


def test_a_checkpoint_is_not_changed_by_later_rounds() -> None:
    state = ClientStateStore(initial(), CLIENTS)
    state.write(EVERYONE, rows(list(range(10, 19))))
    state.commit(1)
    saved = state.tensors()
    state.write(torch.tensor([0]), rows([99]))
    state.commit(2)
    assert saved["rows/count"].tolist() == list(range(10, 19))


def test_restore_replaces_all_state() -> None:
    early = ClientStateStore(initial(), CLIENTS)
    early.write(torch.tensor([8, 2]), rows([80, 20]))
    early.commit(3)
    state = ClientStateStore(initial(), CLIENTS)
    state.write(torch.tensor([5]), rows([50]))
    state.commit(9)
    state.write(torch.tensor([6]), rows([60]))
    state.restore(early.tensors(), 3)
    assert counts(state) == [7, 7, 20, 7, 7, 7, 7, 7, 80]
    assert state.version == 3


def stored(state: ClientStateStore) -> int:
    """The number of rows in memory."""
    assert isinstance(state.rows, RowsInMemory)
    return len(state.rows.rows["w"])


def test_memory_grows_with_the_clients_that_wrote_not_with_all() -> None:
    state = ClientStateStore(initial(), 100_000)
    assert stored(state) == 0
    for number in range(20):
        state.write(torch.tensor([5 * number]), rows([number]))
        state.commit(number)
    assert stored(state) <= 2 * 20 + 2
    for number in range(20):  # the same clients again
        state.write(torch.tensor([5 * number]), rows([number]))
        state.commit(number)
    assert stored(state) <= 2 * 20 + 2


def test_a_client_never_has_more_than_its_committed_and_its_pending_row() -> None:
    state = ClientStateStore(initial(), CLIENTS)
    for number in range(5):
        for client in range(CLIENTS):
            state.write(torch.tensor([client]), rows([client + number]))
        state.commit(number)
    assert stored(state) == 2 * CLIENTS


def test_rows_in_a_file_outlast_the_process(tmp_path: Path) -> None:
    state = ClientStateStore(initial(), CLIENTS, tmp_path)
    state.write(torch.tensor([2, 5]), rows([20, 50]))
    state.commit(1)
    state.write(torch.tensor([2, 6]), rows([21, 61]))
    state.commit(2)
    state.write(torch.tensor([5, 7]), rows([52, 72]))
    assert counts(ClientStateStore(initial(), CLIENTS, tmp_path, 2)) == [
        7,
        7,
        21,
        7,
        7,
        50,
        61,
        7,
        7,
    ]


def test_the_version_before_the_last_can_be_opened(tmp_path: Path) -> None:
    """This process committed the round, and another one did not."""
    state = ClientStateStore(initial(), CLIENTS, tmp_path)
    for version in range(1, 4):
        state.write(torch.tensor([version, 8]), rows([10 * version, 80 + version]))
        state.commit(version)
    again = ClientStateStore(initial(), CLIENTS, tmp_path, 2)
    assert counts(again) == [7, 10, 20, 7, 7, 7, 7, 7, 82]
    again.write(torch.tensor([3, 8]), rows([30, 83]))
    again.commit(3)
    assert counts(again) == counts(state)
    with pytest.raises(FedcladeError, match="--resume") as caught:
        ClientStateStore(initial(), CLIENTS, tmp_path, 1)
    assert caught.value.field == "client_state"


def test_a_file_has_no_rows_of_the_run_before(tmp_path: Path) -> None:
    state = ClientStateStore(initial(), CLIENTS, tmp_path)
    state.write(EVERYONE, rows(list(range(10, 19))))
    state.commit(4)
    assert counts(ClientStateStore(initial(), CLIENTS, tmp_path)) == [7] * CLIENTS
    assert [path.name for path in tmp_path.iterdir()] == ["rows"]


def test_calls_of_the_system_that_move_a_part_of_a_record_are_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call moves 2 GiB at most on Linux; here it moves three bytes."""
    for name in ("preadv", "pwritev"):
        whole = getattr(os, name)

        def move(file: int, buffers: list[memoryview], offset: int, whole: Any = whole) -> int:
            return int(whole(file, [buffers[0][:3]], offset))

        monkeypatch.setattr(os, name, move)
    state = ClientStateStore(initial(), CLIENTS, tmp_path)
    state.write(torch.tensor([2, 5]), rows([20, 50]))
    state.commit(1)
    assert counts(state) == [7, 7, 20, 7, 7, 50, 7, 7, 7]


def test_a_file_that_was_cut_is_an_error(tmp_path: Path) -> None:
    state = ClientStateStore(initial(), CLIENTS, tmp_path)
    state.write(torch.tensor([2, 5]), rows([20, 50]))
    os.truncate(tmp_path / "rows", 20)  # in the second record
    with pytest.raises(WriteError, check=lambda error: error.field == str(tmp_path / "rows")):
        state.read(EVERYONE)


def test_a_system_without_posix_fallocate_keeps_all_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as macOS."""
    monkeypatch.delattr(os, "posix_fallocate")
    state = ClientStateStore(initial(), CLIENTS, tmp_path)
    for version in (1, 2):
        state.write(EVERYONE, rows(list(range(10 * version, 10 * version + CLIENTS))))
        state.commit(version)
        assert (tmp_path / "rows").stat().st_size >= version * CLIENTS * 16
    assert counts(ClientStateStore(initial(), CLIENTS, tmp_path, 1)) == list(range(10, 19))
    assert counts(ClientStateStore(initial(), CLIENTS, tmp_path)) == [7] * CLIENTS


def test_a_full_disk_is_an_error_before_rows_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    state = ClientStateStore(initial(), CLIENTS, tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(WriteError, match="the disk is full"):
        state.write(torch.tensor([0]), rows([1]))


@pytest.mark.parametrize(
    "wrong",
    [{"w": torch.zeros(1, 2)}, {"w": torch.zeros(1, 2), "other": torch.zeros(1)}, {}],
    ids=["less", "other", "none"],
)
def test_client_state_under_other_names_is_refused_with_both_lists(wrong: Tree) -> None:
    state = ClientStateStore(initial(), CLIENTS)
    with pytest.raises(InvalidInputError) as caught:
        state.write(torch.tensor([0]), wrong)
    assert caught.value.field == "initial_client_state"
    assert str(sorted(wrong)) in str(caught.value)
    assert "['count', 'w']" in str(caught.value)
    assert counts(state) == [7] * CLIENTS


def test_client_state_of_another_shape_is_refused_with_both_shapes() -> None:
    state = ClientStateStore(initial(), CLIENTS)
    with pytest.raises(InvalidInputError) as caught:
        state.write(
            torch.tensor([0]), {"w": torch.zeros(1, 1), "count": torch.zeros(1, dtype=torch.int64)}
        )
    assert caught.value.field == "initial_client_state"
    assert all(part in str(caught.value) for part in ("'w'", "(1,)", "(2,)"))


def test_a_method_without_client_state_has_none() -> None:
    state = ClientStateStore({}, CLIENTS)
    assert state.read(EVERYONE) == {}
    state.commit(4)
    assert state.tensors() == {}
    state.rollback()
    state.restore({}, 5)
    assert state.version == 5
    with pytest.raises(InvalidInputError, match=r"\[\]") as caught:
        state.write(torch.tensor([0]), rows([1]))
    assert caught.value.field == "initial_client_state"


def test_dtypes_survive() -> None:
    state = ClientStateStore(initial(), CLIENTS)
    state.write(torch.tensor([0]), rows([1]))
    read = state.read(EVERYONE)
    assert (read["w"].dtype, read["count"].dtype) == (torch.float32, torch.int64)
    state.commit(1)
    saved = state.tensors()
    assert (saved["rows/w"].dtype, saved["rows/count"].dtype) == (torch.float32, torch.int64)
