"""Properties of every scheme, for any data, number of clients and seed.

Requests are built from the classes and ids without the probe, so that they are possible. The probe
depends only on the data and the seed. Each test counts its cases and asserts that there are enough.
Impossible requests have other tests below.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedclade.data import (
    PARTITIONS,
    Clients,
    Dataset,
    Dirichlet,
    Drift,
    FeatureClusters,
    FlippedId,
    Iid,
    LabelClusters,
    LabelPermutation,
    LabelSwap,
    NaturalId,
    Pathological,
    PowerLawClusters,
    QuantitySkew,
    Rotation,
    Scheme,
    dataset,
    partition,
)
from fedclade.errors import InvalidInputError

TEST = 1000  # test samples are numbered from here, so that the pixels identify a sample
MANY = 25  # clients of a request
EXAMPLES = 30  # requests that a property is checked on, for each scheme
LEAST = 20  # and how many of them must be accepted

CHECKED: Counter[tuple[str, str]] = Counter()  # accepted requests of (property, scheme)

FOLLOWED = ("iid", "dirichlet", "pathological", "quantity_skew")
PLANTED = ("label_swap", "label_permutation", "rotation", "drift")
CLUSTERED = ("label_clusters", "power_law_clusters")
NATURAL = ("natural_id", "flipped_id")


@st.composite
def data_sets(draw: st.DrawFn) -> Dataset:
    """Images whose corner pixel is the number of the sample: a rotation by 90 degrees keeps the
    sum.
    """
    counts = draw(st.lists(st.integers(6, 20), min_size=2, max_size=7))
    test_counts = draw(st.lists(st.integers(0, 6), min_size=len(counts), max_size=len(counts)))
    order = np.random.default_rng(draw(st.integers(0, 3)))
    y, y_test = (
        order.permutation(np.repeat(np.arange(len(c)), c))
        for c in (counts, [*test_counts[:-1], test_counts[-1] + 1])
    )
    x, x_test = (
        np.zeros((len(y), 1, 2, 2), np.float32),
        np.zeros((len(y_test), 1, 2, 2), np.float32),
    )
    x[:, 0, 0, 0], x_test[:, 0, 0, 0] = np.arange(len(y)), TEST + np.arange(len(y_test))
    return dataset(x, y, x_test, y_test, writer=(np.arange(len(y)) % 9, np.arange(len(y_test)) % 4))


@dataclass(frozen=True)
class Rest:
    """A data set without the probe of a seed. The probe is the same for every scheme."""

    data: Dataset
    seed: int
    counts: list[int]  # samples of each class that is left
    ids: int  # different writers that are left

    @staticmethod
    def of(data: Dataset, seed: int) -> Rest:
        everything = partition(data, Iid(), 1, seed, probe=None)
        rows = everything.train.index
        counts = [count for count in everything.y[rows].bincount().tolist() if count]
        return Rest(data, seed, counts, len(set(data.keys["writer"][0][rows].tolist())))

    @property
    def samples(self) -> int:
        return sum(self.counts)

    @property
    def classes(self) -> int:
        return len(self.counts)

    @property
    def fewest(self) -> int:
        return min(self.counts)


@dataclass(frozen=True)
class Request:
    rest: Rest
    scheme: Scheme
    clients: int

    @property
    def data(self) -> Dataset:
        return self.rest.data

    def partition(self, seed_offset: int = 0) -> Clients:
        return partition(
            self.data, self.scheme, self.clients, self.rest.seed + seed_offset, probe=None
        )


rests = st.builds(Rest.of, data_sets(), st.integers(0, 2**40))
alphas = st.sampled_from([1e-3, 0.1, 1.0, 100.0])
test_fractions = st.sampled_from([0.01, 0.2, 0.99])


def clients_from(draw: st.DrawFn, least: int, most: int) -> int:
    return draw(st.integers(least, max(least, min(MANY, most))))


def maybe_samples(draw: st.DrawFn, most: int) -> int | None:
    return draw(st.none() | st.integers(1, min(5, most))) if most >= 1 else None


def iid(draw: st.DrawFn, rest: Rest) -> tuple[Scheme, int]:
    return Iid(), clients_from(draw, 1, rest.samples)


def dirichlet(draw: st.DrawFn, rest: Rest) -> tuple[Scheme, int]:
    clients = clients_from(draw, 1, rest.samples)
    least = draw(st.integers(1, min(3, rest.samples // clients)))
    return Dirichlet(draw(alphas), least, draw(st.booleans())), clients


def quantity_skew(draw: st.DrawFn, rest: Rest) -> tuple[Scheme, int]:
    return QuantitySkew(draw(alphas)), clients_from(draw, 1, rest.samples)


def pathological(draw: st.DrawFn, rest: Rest) -> tuple[Scheme, int]:
    wanted = draw(st.integers(1, min(4, rest.classes)))
    most = max(rest.classes * (rest.fewest // wanted), min(rest.fewest, rest.classes))
    return Pathological(wanted), clients_from(draw, 1, most)


def natural_id(draw: st.DrawFn, rest: Rest) -> tuple[Scheme, int]:
    return NaturalId(test_fraction=draw(test_fractions)), clients_from(draw, 1, rest.ids)


def flipped_id(draw: st.DrawFn, rest: Rest) -> tuple[Scheme, int]:
    flipped = draw(st.sampled_from([0.0, 0.3, 0.5, 1.0]))
    scheme = FlippedId("writer", draw(test_fractions), flipped)
    return scheme, clients_from(draw, 1, rest.ids)


def label_clusters(draw: st.DrawFn, rest: Rest) -> tuple[Scheme, int]:
    # A class that two clusters share gives each about half; a cluster needs a sample a client.
    overlap = draw(st.integers(0, int(rest.classes >= 3 and rest.fewest >= 2)))
    most_classes = 1 + rest.classes // 3 if overlap else rest.classes
    classes = draw(st.integers(1 + overlap, min(3, most_classes)))
    most_clusters = rest.classes // (classes - overlap)
    clusters = draw(st.integers(3 if overlap else 1, min(4, most_clusters)))
    most = clusters * classes * (rest.fewest // (1 + overlap))
    clients = clients_from(draw, clusters, most)
    members = math.ceil(clients / clusters)
    piece = rest.fewest * members // (2 * members + 1) if overlap else rest.fewest
    samples = maybe_samples(draw, classes * piece // members)
    return LabelClusters(clusters, classes, overlap, samples), clients


def power_law_clusters(draw: st.DrawFn, rest: Rest) -> tuple[Scheme, int]:
    classes = draw(st.integers(1, 3))
    clusters = draw(st.integers(1, min(3, (rest.classes - 1) // classes + 1)))
    cuts = [classes * cluster for cluster in range(clusters)]
    available = np.add.reduceat(rest.counts, cuts).tolist()
    return PowerLawClusters(clusters, classes), clients_from(
        draw, clusters, clusters * min(available)
    )


def planted_clients(draw: st.DrawFn, rest: Rest, clusters: int) -> tuple[int, int | None]:
    clients = clients_from(draw, clusters, rest.samples)
    return clients, maybe_samples(draw, rest.samples // clients)


def relabelings(classes: int, swaps: int) -> int:
    return math.comb(classes, 2 * swaps) * math.prod(range(1, 2 * swaps, 2))


def label_swap(draw: st.DrawFn, rest: Rest) -> tuple[Scheme, int]:
    swaps = draw(st.integers(1, min(2, rest.classes // 2)))
    clusters = draw(st.integers(1, min(5, relabelings(rest.classes, swaps))))
    clients, samples = planted_clients(draw, rest, clusters)
    return LabelSwap(clusters, swaps, samples), clients


def label_permutation(draw: st.DrawFn, rest: Rest) -> tuple[Scheme, int]:
    clusters = draw(st.integers(1, min(5, math.factorial(rest.classes))))
    clients, samples = planted_clients(draw, rest, clusters)
    return LabelPermutation(clusters, samples), clients


def rotation(draw: st.DrawFn, rest: Rest) -> tuple[Scheme, int]:
    clusters = draw(st.sampled_from([1, 2, 4]))
    clients, samples = planted_clients(draw, rest, clusters)
    return Rotation(clusters, samples), clients


def drift(draw: st.DrawFn, rest: Rest) -> tuple[Scheme, int]:
    kind = draw(st.sampled_from(["swap_labels", "rotate", "move"]))
    if kind == "rotate":
        clusters = draw(st.sampled_from([1, 2]))
    else:
        least, pairs = (2, math.comb(rest.classes, 2)) if kind == "move" else (1, 0)
        pairs = pairs or math.comb(rest.classes, 2) // 2
        if pairs < least:
            kind, pairs, least = "rotate", 2, 1
        clusters = draw(st.integers(least, min(4, pairs) if kind != "rotate" else 2))
    clients, samples = planted_clients(draw, rest, clusters)
    at = draw(st.tuples(st.integers(1, 9), *[st.integers(0, 9)] * (clusters - 1)))
    return Drift(kind, clusters, at, draw(st.sampled_from([0.2, 1.0])), samples), clients


def feature_clusters(draw: st.DrawFn, rest: Rest) -> tuple[Scheme, int]:
    """`emd` is a fraction of the possible range here: see `reachable`."""
    emd = draw(st.sampled_from([None, None, 0.1, 0.5, 0.9]))
    return FeatureClusters(emd), clients_from(draw, 1, rest.fewest)


def reachable(request: Request) -> Request:
    """The request with a possible distance. The error of an impossible one has the range."""
    share = request.scheme.emd if isinstance(request.scheme, FeatureClusters) else None
    if share is None:
        return request
    error = error_of(replace(request, scheme=FeatureClusters(emd=1e9)))
    _, _, _, _, *bounds = map(float, re.findall(r"\d+(?:\.\d+)?", str(error)))
    if not bounds:
        return replace(request, scheme=FeatureClusters())
    least, most = bounds
    return replace(request, scheme=FeatureClusters(least + share * (most - least)))


BUILDERS: dict[str, Callable[[st.DrawFn, Rest], tuple[Scheme, int]]] = {
    build.__name__: build
    for build in (
        iid,
        dirichlet,
        pathological,
        natural_id,
        label_clusters,
        power_law_clusters,
        label_swap,
        label_permutation,
        rotation,
        quantity_skew,
        feature_clusters,
        flipped_id,
        drift,
    )
}


@st.composite
def requests(draw: st.DrawFn, name: str) -> Request:
    """A request for the scheme `name` that can be met."""
    rest = draw(rests)
    return Request(rest, *BUILDERS[name](draw, rest))


def check(
    case: str, name: str, check_one: Callable[[Request], None], also: tuple[str, int] | None = None
) -> None:
    """`check_one` on requests for the scheme `name`, until enough of them were accepted.

    also: a second case that `check_one` counts, and how often it must have been reached.
    """
    goals = [(case, LEAST), *([also] if also is not None else [])]

    @settings(max_examples=EXAMPLES, deadline=None)
    @given(requests(name))
    def run(request: Request) -> None:
        check_one(reachable(request))
        CHECKED[case, name] += 1

    # Drawn requests reach a goal with high probability, not for certain: draw again, a few times.
    for _ in range(10):
        run()
        if all(CHECKED[goal, name] >= least for goal, least in goals):
            return
    raise AssertionError(f"too few real cases: {goals} of {name}, {dict(CHECKED)}")


def error_of(request: Request) -> InvalidInputError:
    with pytest.raises(InvalidInputError) as caught:
        request.partition()
    return caught.value


def numbers(x: torch.Tensor) -> list[int]:
    return x.flatten(1).sum(1).long().tolist()


def original_labels(data: Dataset, samples: list[int]) -> list[int]:
    return [int(data.y_test[n - TEST] if n >= TEST else data.y_train[n]) for n in samples]


def test_part(clients: Clients, client: int) -> torch.Tensor:
    part = int(clients.test_part_id[client])
    return clients.test[part] if part >= 0 else torch.empty(0, dtype=torch.int64)


test_part.__test__ = False  # type: ignore[attr-defined]


def test_every_scheme_has_requests() -> None:
    """PFLlib's divides the test samples too: test_pfllib.py."""
    assert set(BUILDERS) == set(PARTITIONS) - {"pfllib"}


@pytest.mark.parametrize("name", BUILDERS)
def test_every_partition(name: str) -> None:
    check("every partition", name, check_partition)


def check_partition(request: Request) -> None:
    data, number, name = request.data, request.clients, request.scheme.name
    clients = request.partition()
    described = clients.describe()
    assert len(clients) == number == len(clients.test_part_id)
    assert clients.sizes.min() >= 1
    assert clients.groups is None or len(clients.groups) == number
    assert described.counts is not None
    assert torch.equal(described.counts.sum(1), clients.sizes)

    train = numbers(clients.x[clients.train.index])
    assert len(set(train)) == len(train), "no sample belongs to two clients"
    test = set(numbers(clients.x_test))
    assert set(train).isdisjoint(test)
    assert clients.probe is not None
    assert len(clients.probe) == len(data.y_train) // 10
    assert set(numbers(clients.probe)).isdisjoint(set(train) | test)

    for client in range(number):
        rows, test_rows = clients.train[client], test_part(clients, client)
        tested = numbers(clients.x_test[test_rows])
        assert len(set(tested)) == len(tested), "no test sample counts twice for a client"
        held, seen = set(clients.y[rows].tolist()), set(clients.y_test[test_rows].tolist())
        if name in (*FOLLOWED, "feature_clusters"):
            assert seen <= held
        assert described.test_sizes[client] == len(test_rows)
    assert len(clients.test_sample_id) == len(clients.x_test)
    assert clients.test_part_id.min() >= -1
    assert clients.test_part_id.max() < len(clients.test)
    assert (clients.test.sizes > 0).all()
    if name not in NATURAL:
        assert (
            torch.tensor(numbers(clients.x_test)) - TEST
        ).tolist() == clients.test_sample_id.tolist()


@pytest.mark.parametrize("name", PLANTED)
def test_training_and_test_part_see_the_same_transformation(name: str) -> None:
    check("same transformation", name, check_transformation)


def check_transformation(request: Request) -> None:
    clients, scheme = request.partition(), request.scheme
    tables: dict[int, dict[int, int]] = {}
    corners: dict[int, set[int]] = {}
    for versions in (clients, clients.at_round(9)):
        collect_transformations(request.data, versions, tables, corners)
    rotates = scheme.name == "rotation" or (isinstance(scheme, Drift) and scheme.kind == "rotate")
    for group, table in tables.items():
        assert len(set(table.values())) == len(table)
        if rotates:
            assert all(k == v for k, v in table.items())
            assert len(corners[group]) <= 1
        else:
            assert corners[group] <= {0}
    if clients.later is None:
        assert clients.groups is not None
        assert len(clients.x) == clients.sizes.sum()
        assert len(clients.x_test) == len(request.data.y_test) * len(set(clients.groups.tolist()))


def collect_transformations(
    data: Dataset,
    clients: Clients,
    tables: dict[int, dict[int, int]],
    corners: dict[int, set[int]],
) -> None:
    """Add the new label of each label and the corner of the pixel to those of each group."""
    assert clients.groups is not None
    for client, group in enumerate(clients.groups.tolist()):
        for x, y, rows in (
            (clients.x, clients.y, clients.train[client]),
            (clients.x_test, clients.y_test, test_part(clients, client)),
        ):
            samples = numbers(x[rows])
            for original, label in zip(
                original_labels(data, samples), y[rows].tolist(), strict=True
            ):
                assert tables.setdefault(group, {}).setdefault(original, label) == label
            corners.setdefault(group, set()).update(
                x[rows][torch.tensor(samples) > 0].flatten(1).argmax(1).tolist()
            )
        assert len(test_part(clients, client)) == len(data.y_test)


def test_flipped_clients_have_all_labels_reversed() -> None:
    check("reversed labels", "flipped_id", check_reversal)


def check_reversal(request: Request) -> None:
    data, clients = request.data, request.partition()
    assert isinstance(request.scheme, FlippedId)
    assert clients.groups is not None
    assert data.classes is not None
    assert clients.groups.sum() == round(request.scheme.flipped * request.clients)
    for client, group in enumerate(clients.groups.tolist()):
        for x, y, rows in (
            (clients.x, clients.y, clients.train[client]),
            (clients.x_test, clients.y_test, test_part(clients, client)),
        ):
            originals = original_labels(data, numbers(x[rows]))
            expected = [data.classes - 1 - y for y in originals] if group else originals
            assert y[rows].tolist() == expected


@pytest.mark.parametrize("name", CLUSTERED)
def test_clusters_are_made_of_classes(name: str) -> None:
    check("clusters of classes", name, check_clusters)


def check_clusters(request: Request) -> None:
    data, scheme, clients = request.data, request.scheme, request.partition()
    assert isinstance(scheme, LabelClusters | PowerLawClusters)
    assert clients.groups is not None
    assert sorted(set(clients.groups.tolist())) == list(range(scheme.clusters))
    sizes = clients.groups.bincount()
    assert sizes.max() - sizes.min() <= 1
    own: list[set[int]] = [set() for _ in sizes]
    for client, group in enumerate(clients.groups.tolist()):
        own[group].update(clients.y[clients.train[client]].tolist())
    if isinstance(scheme, LabelClusters):
        assert all(len(classes) <= scheme.classes for classes in own)
        if scheme.samples is not None:
            assert (clients.sizes == scheme.samples).all()
        elif scheme.overlap == 0:
            for g in range(scheme.clusters):
                within = clients.sizes[clients.groups == g]
                assert within.max() - within.min() <= 1
    for client, group in enumerate(clients.groups.tolist()):
        tested = clients.y_test[test_part(clients, client)].tolist()
        seen = set(tested)
        assert len(tested) == sum(label in seen for label in data.y_test.tolist()), (
            "all test samples of these classes"
        )
        if not isinstance(scheme, LabelClusters) or scheme.samples is None:
            assert seen <= own[group]


@pytest.mark.parametrize("name", BUILDERS)
def test_the_seed_decides_everything(name: str) -> None:
    check("same seed", name, check_seed, also=("other seed", LEAST // 2))


def check_seed(request: Request) -> None:
    first, again = request.partition(), request.partition()
    for field in ("x", "y", "x_test", "y_test", "test_part_id", "test_sample_id", "probe"):
        assert getattr(first, field).numpy().tobytes() == getattr(again, field).numpy().tobytes()
    for a, b in ((first.train, again.train), (first.test, again.test)):
        assert torch.equal(a.index, b.index)
        assert torch.equal(a.offsets, b.offsets)
    if len(request.data.y_train) < 30:
        return  # too few for two seeds to differ for certain
    try:
        other = request.partition(seed_offset=1)
    except InvalidInputError:
        return  # another probe is set apart, and then too few samples of a class may be left
    assert first.probe is not None
    assert other.probe is not None
    assert (numbers(first.probe), numbers(first.x[first.train.index])) != (
        numbers(other.probe),
        numbers(other.x[other.train.index]),
    )
    CHECKED["other seed", request.scheme.name] += 1


@pytest.mark.parametrize("name", FOLLOWED)
def test_followed_test_parts_have_the_right_size(name: str) -> None:
    check("test sizes", name, check_test_sizes)


def check_test_sizes(request: Request) -> None:
    data, clients = request.data, request.partition()
    pool = len(data.y_train) - len(data.y_train) // 10
    described = clients.describe()
    assert described.counts is not None
    available = data.y_test.bincount(minlength=described.counts.shape[1])
    for client, size in enumerate(described.test_sizes.tolist()):
        wanted = max(1, round(int(clients.sizes[client]) * len(data.y_test) / pool))
        testable = available[described.counts[client] > 0]
        assert size <= wanted
        assert (size >= 1) == bool((testable > 0).any())
        if (testable >= wanted).all():
            assert size == wanted


# Requests that cannot be met: (scheme, field) -> such a request, from one that can be met.
REFUSED: dict[tuple[str, str], Callable[[Rest], tuple[Scheme, int]]] = {
    ("dirichlet", "min_size"): lambda rest: (Dirichlet(min_size=rest.samples // 3 + 1), 3),
    ("pathological", "classes_per_client"): lambda rest: (Pathological(rest.classes + 1), 3),
    # Every client owns a sample of two classes, and there are not two for each.
    ("pathological", "clients"): lambda rest: (Pathological(2), rest.samples // 2 + 1),
    ("natural_id", "key"): lambda rest: (NaturalId("author"), 3),
    ("natural_id", "clients"): lambda rest: (NaturalId(), rest.ids + 1),
    ("flipped_id", "key"): lambda rest: (FlippedId(), 3),
    ("flipped_id", "clients"): lambda rest: (FlippedId("writer"), rest.ids + 1),
    ("label_clusters", "clusters"): lambda rest: (
        LabelClusters(rest.classes + 1, 1),
        rest.classes + 1,
    ),
    ("label_clusters", "classes"): lambda rest: (LabelClusters(1, rest.classes + 1), 3),
    ("label_clusters", "clients for clusters"): lambda rest: (LabelClusters(2, 1), 1),
    ("label_clusters", "clients"): lambda rest: (
        LabelClusters(rest.classes, 1),
        rest.classes * (rest.fewest + 1),
    ),
    ("label_clusters", "samples"): lambda rest: (
        LabelClusters(rest.classes, 1, samples=rest.fewest + 1),
        rest.classes,
    ),
    ("power_law_clusters", "clusters"): lambda rest: (
        PowerLawClusters(rest.classes + 1, 1),
        rest.classes + 1,
    ),
    ("power_law_clusters", "clients for clusters"): lambda rest: (PowerLawClusters(2, 1), 1),
    ("power_law_clusters", "clients"): lambda rest: (
        PowerLawClusters(rest.classes, 1),
        rest.classes * (rest.fewest + 1),
    ),
    ("label_swap", "swaps"): lambda rest: (LabelSwap(1, rest.classes // 2 + 1), 3),
    ("label_swap", "clusters"): lambda rest: (
        LabelSwap(relabelings(rest.classes, 1) + 1, 1),
        5,
    ),
    ("label_swap", "clients for clusters"): lambda rest: (LabelSwap(1 + rest.classes // 2), 1),
    ("label_swap", "samples"): lambda rest: (LabelSwap(1, 1, rest.samples // 3 + 1), 3),
    ("label_permutation", "clusters"): lambda rest: (
        LabelPermutation(math.factorial(rest.classes) + 1),
        5,
    ),
    ("label_permutation", "clients for clusters"): lambda rest: (LabelPermutation(2), 1),
    ("label_permutation", "samples"): lambda rest: (
        LabelPermutation(1, rest.samples // 3 + 1),
        3,
    ),
    ("rotation", "clients for clusters"): lambda rest: (Rotation(4), 3),
    ("rotation", "samples"): lambda rest: (Rotation(1, rest.samples // 3 + 1), 3),
    ("feature_clusters", "clients"): lambda rest: (FeatureClusters(), rest.fewest + 1),
    ("feature_clusters", "emd"): lambda rest: (FeatureClusters(1e9), 2),
}
FIELD = {"classes": "clusters", "clients for clusters": "clusters"}  # of the error


@pytest.mark.parametrize(("name", "field"), REFUSED)
@given(rest=rests)
@settings(max_examples=LEAST, deadline=None)
def test_an_impossible_request_is_an_error_about_its_field(
    name: str, field: str, rest: Rest
) -> None:
    request = Request(rest, *REFUSED[name, field](rest))
    assert request.scheme.name == name
    error = error_of(request)
    assert error.field == f"partition.{FIELD.get(field, field)}"
    assert str(error).startswith(f"{error.field} = ")


@pytest.mark.parametrize("name", BUILDERS)
def test_advice_on_the_number_of_clients_works(name: str) -> None:
    check("advice", name, check_advice)


def check_advice(request: Request) -> None:
    assert follow_advice(replace(request, clients=request.rest.samples + 1 + request.clients))
    follow_advice(replace(request, clients=20 + request.rest.seed % 181))


def follow_advice(request: Request) -> bool:
    """Follows the advice on the number of clients until the request is accepted; returns whether
    there was any.
    """
    advised = False
    for _ in range(3):
        try:
            request.partition()
            return advised
        except InvalidInputError as error:
            field, message = error.field, str(error)
        if field != "partition.clients":  # too few samples for this value, not for the clients
            assert field in ("partition.samples", "partition.min_size", "partition.emd"), message
            replace(request, scheme=without_size(request.scheme)).partition()
            return advised
        most = int(re.findall(r"\d+", message)[-1])
        assert 1 <= most < request.clients, message
        request, advised = replace(request, clients=most), True
    raise AssertionError("three times the advice was wrong")


def without_size(scheme: Scheme) -> Scheme:
    """The scheme without what it demands of each client's samples."""
    if isinstance(scheme, Dirichlet):
        return replace(scheme, min_size=1)
    if isinstance(scheme, FeatureClusters):
        return FeatureClusters()
    assert isinstance(scheme, LabelClusters | LabelSwap | LabelPermutation | Rotation | Drift)
    return replace(scheme, samples=None)
