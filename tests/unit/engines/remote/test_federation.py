"""A federation of sites: what counts when letters are lost, sites come and go, and answers do not fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from tests.unit.engines.remote.in_process_transport import ABOUT, Letterbox, Remote, sites_of

from fedclade import SCAFFOLD, FedAvg, Local, LocalTraining
from fedclade.core.federation import Rows
from fedclade.core.functional_model import Objective
from fedclade.core.program import sgd
from fedclade.core.program_serialization import Here
from fedclade.core.pytree import Tree
from fedclade.data import Clients
from fedclade.engines.remote.federation import NOT_CONNECTED, RemoteFederation
from fedclade.engines.remote.messages import Letter
from fedclade.engines.remote.node import InMemory, Site
from fedclade.errors import InvalidInput
from fedclade.models import MLP


@pytest.fixture
def here(ragged: Clients) -> Here:
    torch.manual_seed(0)
    return Here(Objective(MLP(8).build(ragged.shape, 3)))


@pytest.fixture
def local(here: Here) -> LocalTraining:
    return LocalTraining(here.objective, lr=0.05, batch_size=4)


def everyone(clients: Clients) -> torch.Tensor:
    return torch.arange(len(clients))


def train(fed: RemoteFederation, local: LocalTraining, ids: torch.Tensor, key: int = 0) -> object:
    params = {name: value[None] for name, value in local.objective.params().items()}
    return fed.map(sgd(local), ids, each=Rows(params, torch.zeros_like(ids)), key=key)


def test_a_site_has_one_letter_with_each_model_once(ragged: Clients, here: Here, local: LocalTraining) -> None:
    fed = Remote(ragged, here)
    fed.box.carried.clear()
    train(fed, local, everyone(ragged))
    (letters,) = fed.box.carried
    assert sorted(letters) == ["site-0", "site-1"]
    size = sum(value.numel() * 4 for value in local.objective.params().values())
    assert [letter.nbytes for letter in letters.values()] == [size, size]
    assert fed.traffic.down == 2 * size
    assert fed.traffic.up == len(ragged) * size


def test_who_is_not_connected_is_a_failure_and_nothing_waits(ragged: Clients, here: Here, local: LocalTraining) -> None:
    fed = Remote(ragged, here)
    gone = fed.box.here.pop("site-1")
    fed.gather()
    got = train(fed, local, everyone(ragged))
    assert got.ids.tolist() == [0, 2, 4]
    assert [(failure.client, failure.reason) for failure in got.failures] == [(client, NOT_CONNECTED) for client in (1, 3, 5)]
    fed.box.here["site-1"] = gone
    fed.gather()
    assert len(train(fed, local, everyone(ragged)).ids) == len(ragged)


def test_a_late_site_gets_new_numbers_and_keeps_them(ragged: Clients, here: Here, local: LocalTraining) -> None:
    sites = sites_of(ragged, 3, lambda data, names: Site(data, names, here, {}, ABOUT))
    late = sites.pop("site-0")
    box = Letterbox(sites)
    fed = RemoteFederation(box, ABOUT)
    fed.gather()
    assert [seat.name for seat in fed.seats] == ["1", "4", "2", "5"]
    box.here["site-0"] = late
    fed.gather()
    assert [seat.name for seat in fed.seats] == ["1", "4", "2", "5", "0", "3"]
    assert fed.sizes.tolist() == [int(ragged.sizes[int(seat.name)]) for seat in fed.seats]
    assert len(train(fed, local, torch.arange(6)).ids) == 6


def test_a_client_that_moves_to_another_site_keeps_its_number(ragged: Clients, here: Here) -> None:
    sites = sites_of(ragged, 2, lambda data, names: Site(data, names, here, {}, ABOUT))
    box = Letterbox(sites)
    fed = RemoteFederation(box, ABOUT)
    fed.gather()
    before = [seat.name for seat in fed.seats]
    box.here["new place"] = box.here.pop("site-1")
    fed.gather()
    assert [seat.name for seat in fed.seats] == before
    assert {seat.site for seat in fed.seats} == {"site-0", "new place"}


def test_a_second_site_with_the_same_clients_is_refused(ragged: Clients, here: Here) -> None:
    sites = sites_of(ragged, 2, lambda data, names: Site(data, names, here, {}, ABOUT))
    said: list[str] = []
    box = Letterbox(sites)
    fed = RemoteFederation(box, ABOUT, note=said.append)
    fed.gather()
    box.here["twin"] = sites["site-1"]
    fed.gather()
    assert {seat.site for seat in fed.seats} == {"site-0", "site-1"}
    assert said[-1] == "twin: not used: its client '1' is already there, at site-1"


def test_another_version_is_refused_with_both_sides_named(ragged: Clients, here: Here) -> None:
    said: list[str] = []
    other = {**ABOUT, "fedclade": "0.9"}
    sites = sites_of(ragged, 1, lambda data, names: Site(data, names, here, {}, other))
    fed = RemoteFederation(Letterbox(sites), ABOUT, note=said.append)
    fed.gather()
    assert "fedclade: the server has test, this site 0.9" in said[0]
    with pytest.raises(InvalidInput, match="no site has answered"):
        fed.population()


def test_a_letter_for_another_configuration_is_refused_at_the_site(ragged: Clients, here: Here, local: LocalTraining) -> None:
    fed = Remote(ragged, here)
    fed.about = {**ABOUT, "configuration": "two"}
    got = train(fed, local, everyone(ragged))
    assert len(got.ids) == 0
    assert "configuration: the server has two, this site one" in got.failures[0].reason


def test_samples_of_another_kind_are_refused(ragged: Clients, here: Here) -> None:
    said: list[str] = []
    sites = sites_of(ragged, 2, lambda data, names: Site(data, names, here, {}, ABOUT))
    odd = replace(sites["site-1"].clients, x=torch.zeros(len(ragged.x), 7))
    sites["site-1"] = Site(odd, sites["site-1"].names, here, {}, ABOUT)
    fed = RemoteFederation(Letterbox(sites), ABOUT, note=said.append)
    fed.gather()
    assert "its samples are of another kind: (7,)" in said[-1]
    assert len(fed.seats) == 3


def tampered(fed: Remote, site: str, change: Callable[[Letter], Letter]) -> None:
    honest = fed.box.here[site].answer
    fed.box.here[site].answer = lambda letter: change(honest(letter))  # type: ignore[method-assign]


def out(letter: Letter, name: str, value: torch.Tensor) -> Letter:
    return Letter(letter.head, {**letter.tensors, f"out/{name}": value})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda a: out(a, "fc2.bias", a.tensors["out/fc2.bias"][:, :2]), "shape of 'fc2.bias': expected (3,), got (2,)"),
        (lambda a: out(a, "fc2.bias", a.tensors["out/fc2.bias"].double()), "dtype of 'fc2.bias'"),
        (lambda a: out(a, "fc2.bias", a.tensors["out/fc2.bias"] * torch.nan), "'fc2.bias' is not finite"),
        (lambda a: out(a, "more", a.tensors["out/fc2.bias"]), "names: expected"),
        (lambda a: Letter({**a.head, "clients": [0, 0]}, a.tensors), "does not fit what was asked"),
        (lambda a: Letter({**a.head, "clients": [0, 9]}, a.tensors), "does not fit what was asked"),
        (lambda a: Letter({"clients": [], "failures": []}), "did not answer for it"),
        (lambda a: Letter({"refused": "RuntimeError: boom"}), "RuntimeError: boom"),
    ],
)
def test_what_does_not_fit_costs_only_its_own_site(
    ragged: Clients, here: Here, local: LocalTraining, change: Callable[[Letter], Letter], reason: str
) -> None:
    fed = Remote(ragged, here, sites=3)
    tampered(fed, "site-1", change)
    got = train(fed, local, everyone(ragged))
    assert got.ids.tolist() == [0, 2, 3, 5]
    assert all(reason in failure.reason for failure in got.failures)
    assert [failure.client for failure in got.failures] == [1, 4]


def test_a_client_whose_own_data_break_the_program_costs_only_itself(ragged: Clients, here: Here, local: LocalTraining) -> None:
    """Client 4 has a label that no output stands for."""
    y = ragged.y.clone()
    y[ragged.train[4]] = 77
    fed = Remote(replace(ragged, y=y), here)
    got = train(fed, local, everyone(ragged))
    assert got.ids.tolist() == [0, 1, 2, 3, 5]
    assert [failure.client for failure in got.failures] == [4]


def committed(fed: Remote, ids: torch.Tensor) -> Tree:
    return fed.read(ids)


def test_memory_of_a_turn_that_was_not_answered_in_time_does_not_count(ragged: Clients, here: Here, local: LocalTraining) -> None:
    method = SCAFFOLD().bind(local)
    late, never = Remote(ragged, here), Remote(ragged, here)
    for fed in (late, never):
        fed.remember(method.memory0(here.objective.params()))
    state = method.init(late, here.objective.params(), key=0)
    late.memory.commit(0)
    never.memory.commit(0)
    late.box.lost = lambda site, letter: site == "site-1"
    one = method.round(late, state, everyone(ragged), key=1)
    late.memory.commit(1)
    late.box.lost = lambda site, letter: False
    other = method.round(never, state, torch.tensor([0, 2, 4]), key=1)
    never.memory.commit(1)
    ends = [method.round(fed, state, everyone(ragged), key=2) for fed, state in ((late, one), (never, other))]
    for name, value in ends[0].models.items():
        torch.testing.assert_close(value, ends[1].models[name])


def test_a_server_that_died_in_a_round_finds_the_memory_of_the_round_before(ragged: Clients, here: Here, local: LocalTraining) -> None:
    method = SCAFFOLD().bind(local)
    undisturbed, first = Remote(ragged, here), Remote(ragged, here)
    states = []
    for fed in (undisturbed, first):
        fed.remember(method.memory0(here.objective.params()))
        state = method.init(fed, here.objective.params(), key=0)
        fed.memory.commit(0)
        states.append(method.round(fed, state, everyone(ragged), key=1))
        fed.memory.commit(1)
    method.round(first, states[1], everyone(ragged), key=2)  # and the server dies before it has committed
    second = Remote(ragged, here)
    for name, site in second.box.here.items():
        site.keeper = first.box.here[name].keeper
    second.remember(method.memory0(here.objective.params()))
    second.memory.restore(first.memory.tensors(), 1)
    expected = method.round(undisturbed, states[0], everyone(ragged), key=2)
    got = method.round(second, states[1], everyone(ragged), key=2)
    for name, value in expected.models.items():
        assert torch.equal(value, got.models[name])


def test_a_site_that_has_lost_its_disk_begins_anew(ragged: Clients, here: Here, local: LocalTraining) -> None:
    method = SCAFFOLD().bind(local)
    fed = Remote(ragged, here)
    fed.remember(method.memory0(here.objective.params()))
    state = method.init(fed, here.objective.params(), key=0)
    state = method.round(fed, state, everyone(ragged), key=1)
    fed.memory.commit(1)
    fed.box.here["site-1"].keeper = InMemory()
    method.round(fed, state, everyone(ragged), key=2)
    assert {failure.client for failure in fed.drain_failures()} == {1, 3, 5}
    fed.memory.commit(2)
    method.round(fed, state, everyone(ragged), key=3)
    assert fed.drain_failures() == []


def test_each_site_keeps_its_clients_own_models(ragged: Clients, here: Here, local: LocalTraining) -> None:
    method = Local().bind(local)
    fed = Remote(ragged, here)
    fed.remember(method.memory0(here.objective.params()))
    state = method.init(fed, here.objective.params(), key=0)
    state = method.round(fed, state, everyone(ragged), key=1)
    fed.memory.commit(1)
    rows = method.serve(state, everyone(ragged))
    fed.deliver(rows, everyone(ragged))
    keeper = fed.box.here["site-1"].keeper
    assert isinstance(keeper, InMemory)
    assert sorted(keeper.models) == ["1", "3", "5"]
    expected = rows.gather(fed.read(everyone(ragged)))
    for client in (1, 3, 5):
        for name, value in keeper.models[str(client)].items():
            assert torch.equal(value, expected[name][client])
    with pytest.raises(InvalidInput, match="stay with them"):
        fed.models_of(rows, everyone(ragged))


def test_a_model_that_is_served_is_no_secret(ragged: Clients, here: Here, local: LocalTraining) -> None:
    method = FedAvg().bind(local)
    fed = Remote(ragged, here)
    state = method.init(fed, here.objective.params(), key=0)
    got = fed.models_of(method.serve(state, everyone(ragged)), everyone(ragged))
    assert all(len(value) == len(ragged) for value in got.values())


def test_of_two_sites_the_one_that_answers_in_the_form_of_the_model_is_believed(ragged: Clients, here: Here, local: LocalTraining) -> None:
    fed = Remote(ragged, here)
    honest = fed.box.exchange

    def exchange(letters: Mapping[str, Letter]) -> dict[str, Letter | str]:
        answers = honest(letters)
        for site, answer in answers.items():
            assert isinstance(answer, Letter)
            if site == "site-0":
                answers[site] = replace(answer, tensors={name: value.double() for name, value in answer.tensors.items()})
        return answers

    fed.box.exchange = exchange  # type: ignore[method-assign]
    ids = everyone(ragged)[:2]  # one at each site
    got = fed.map(sgd(local), ids, each=Rows({name: value[None] for name, value in local.objective.params().items()}, ids * 0), key=0)
    assert got.ids.tolist() == [1]
    assert [(failure.client, failure.refused) for failure in got.failures] == [(0, True)]


def test_a_site_that_says_nonsense_of_itself_is_not_used(ragged: Clients, here: Here) -> None:
    fed = Remote(ragged, here)
    honest, told = fed.box.exchange, []
    fed.box.here["site-9"] = fed.box.here["site-0"]

    def exchange(letters: Mapping[str, Letter]) -> dict[str, Letter | str]:
        answers = honest(letters)
        hello = answers["site-9"]
        assert isinstance(hello, Letter)
        return {"site-9": replace(hello, head={**hello.head, "names": ["x"], "sizes": [-1], "test_sizes": "no"})}

    fed.box.exchange = exchange  # type: ignore[method-assign]
    fed.note = told.append
    before = len(fed.sizes)
    fed.gather()
    assert len(fed.sizes) == before
    assert len(told) == 1
    assert told[0].startswith("site-9: not used: what it says of itself makes no sense (")
