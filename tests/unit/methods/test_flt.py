"""FLT: its special cases, its one-off phase, its encoders, and what it sends."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from sklearn.metrics import adjusted_rand_score
from torch import Tensor, nn
from typer.testing import CliRunner

import fedclade as fc
from fedclade import FedAvg, Local, Method, Simulator
from fedclade.cli import main
from fedclade.core import LocalTraining, sgd
from fedclade.core.functional_encoder import Encoder
from fedclade.core.functional_model import Objective
from fedclade.core.method_state import UNKNOWN
from fedclade.core.program_serialization import NodeContext, from_spec, to_spec
from fedclade.core.pytree import Tree, add_prefix, nbytes
from fedclade.data import Clients, from_arrays
from fedclade.errors import FedcladeError, InvalidInputError
from fedclade.io.checkpoint import flatten, restore
from fedclade.methods.flt import FLT, FLTState
from fedclade.models import MLP
from fedclade.models.autoencoder import (
    Autoencoder,
    ConvAutoencoder,
    DenseAutoencoder,
    ResidualAutoencoder,
)
from fedclade.programs.encoder_signature import (
    MOST_CENTRES,
    autoencode,
    centres_of,
    private_signature,
    signature,
)
from fedclade.training import encoders
from fedclade.training.encoders import pretrain, read, resolve, spec_for
from fedclade.training.setup import inject_context


def started(
    method: Method, clients: Clients, batch_size: int = 4, **options: Any
) -> tuple[Method, Simulator, Any]:
    torch.manual_seed(0)
    objective = Objective(MLP(8).build(clients.shape, 10))
    method = inject_context(method, clients.metadata, seed=0).with_local_config(
        LocalTraining(objective, lr=0.1, batch_size=batch_size)
    )
    fed = Simulator(clients, **options)
    fed.init_client_state(method.initial_client_state(objective.params()))
    return method, fed, method.init(fed, objective.params(), key=0)


def trained(method: Method, clients: Clients, *cohorts: Tensor, batch_size: int = 4) -> Tree:
    """What each client is served after these rounds."""
    method, fed, state = started(method, clients, batch_size)
    for number, cohort in enumerate(cohorts):
        state = method.round(fed, state, cohort, key=number)
        fed.client_state.commit(number + 1)
    ids = torch.arange(len(clients))
    return method.assign_models(state, ids).gather(fed.client_state.read(ids))


def assert_alike(one: Tree, other: Tree) -> None:
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], atol=1e-6, rtol=0)


def small(**settings: Any) -> FLT:
    return FLT(**{"k": 2, "manifold": "none", **settings})


# --- special cases


def test_with_all_clients_related_it_is_fedavg(ragged: Clients) -> None:
    everyone = torch.arange(len(ragged))
    flt = small(gamma=float("inf"))
    assert_alike(
        trained(flt, ragged, everyone, everyone), trained(FedAvg(), ragged, everyone, everyone)
    )


@pytest.mark.parametrize("settings", [{"aggregation": "clusters"}, {"absent": "skip"}])
def test_with_all_clients_related_and_some_absent_it_is_fedavg(
    ragged: Clients, settings: dict[str, str]
) -> None:
    cohorts = [torch.tensor([0, 2, 4]), torch.tensor([1, 2, 5])]
    assert_alike(
        trained(small(gamma=float("inf"), **settings), ragged, *cohorts),
        trained(FedAvg(), ragged, *cohorts),
    )


@pytest.mark.parametrize(
    "settings", [{}, {"aggregation": "clusters"}, {"absent": "skip"}, {"clusters": 6}]
)
def test_with_no_clients_related_it_is_local(ragged: Clients, settings: dict[str, Any]) -> None:
    cohorts = [torch.arange(len(ragged)), torch.tensor([0, 2, 4]), torch.tensor([1, 2, 5])]
    # Whole batches: in smaller ones Local's program, which has another name, would see the samples
    # in another order.
    alone, local = (
        trained(method, ragged, *cohorts, batch_size=40)
        for method in (small(gamma=1e-9, **settings), Local())
    )
    assert_alike(alone, local)


def test_case_1_is_the_mixing_matrix_over_all_clients(ragged: Clients) -> None:
    """Against the formula with M models and the whole of Ã."""
    method, fed, state = started(small(k=1, gamma=0.8, encoder_module=nn.Flatten()), ragged)
    A = state.mixing[state.row].double() * ragged.sizes
    A = A / A.sum(1, keepdim=True)
    assert not torch.equal(
        state.mixing[state.row], state.cluster_ids[:, None] == state.cluster_ids
    )  # being related is not transitive
    cohort, ids = torch.tensor([0, 3, 4]), torch.arange(len(ragged))
    for number in range(2):
        last = method.assign_models(state, ids).gather({})
        got = fed.map(
            sgd(method.local),
            cohort,
            per_client=method.assign_models(state, cohort),
            key=number,
        )
        expected = {
            name: value.double().index_copy(0, cohort, got.outputs[name].double()).flatten(1)
            for name, value in last.items()
        }
        state = method.round(fed, state, cohort, key=number)
        served = method.assign_models(state, ids).gather({})
        for name, value in expected.items():
            torch.testing.assert_close(
                served[name].double().flatten(1), A @ value, atol=1e-6, rtol=0
            )


# --- groups and newcomers


def test_finds_the_groups_of_digits(digits: Clients) -> None:
    for settings in ({"cut": "gap"}, {"clusters": 5}):
        _, _, state = started(small(k=5, **settings), digits)
        assert adjusted_rand_score(digits.groups, state.cluster_ids) == 1.0


def test_late_clients_join_their_own_group(digits: Clients) -> None:
    late = {3, 7, 8, 15, 19}  # one or more of each group
    silent = True

    def answer(key: int, client: int, reply: Tree) -> Tree | None:
        return None if silent and client in late else reply

    method, fed, state = started(small(k=5, clusters=5), digits, faults=answer)
    assert set((state.cluster_ids == UNKNOWN).nonzero().flatten().tolist()) == late
    known = state.cluster_ids.clone()
    silent = False
    state = method.add_clients(fed, state, torch.tensor(sorted(late)), key=1)
    assert adjusted_rand_score(digits.groups, state.cluster_ids) == 1.0
    assert torch.equal(state.cluster_ids[known != UNKNOWN], known[known != UNKNOWN])
    assert torch.equal(state.mixing[state.row], state.cluster_ids[:, None] == state.cluster_ids)


def test_a_run_that_is_resumed_ends_the_same(digits: Clients, tmp_path: Path) -> None:
    def go(folder: str, rounds: int, resume: bool = False) -> fc.Result:
        method = FLT(k=3, manifold="pca", gamma=0.6)
        options = {
            "lr": 0.1,
            "checkpoint_every": 1,
            "eval_every": 0,
            "clients_per_round": 0.5,
            "device": "cpu",
        }
        return fc.run(
            method, digits, MLP(8), rounds=rounds, out=tmp_path / folder, resume=resume, **options
        )  # type: ignore[arg-type]

    whole = go("whole", 4)
    go("parts", 2)
    resumed = go("parts", 4, resume=True)
    assert whole.summary["accuracy"] == resumed.summary["accuracy"]
    assert torch.equal(whole.clusters, resumed.clusters)
    for client in (0, 11):
        for one, other in zip(
            whole.model_of(client).parameters(), resumed.model_of(client).parameters(), strict=True
        ):
            assert torch.equal(one, other)


# --- what is sent


def test_bytes_of_the_one_off_phase(ragged: Clients) -> None:
    module = DenseAutoencoder(hidden=4, code=3).build(ragged.shape)
    module.pretrained = True
    _, fed, _ = started(FLT(k=4, manifold="none", encoder_module=module), ragged)
    encoder = sum(value.numel() for value in module.encoder.parameters())
    assert fed.traffic.down == len(ragged) * encoder * 4  # M W_enc: the decoder stays at home
    assert fed.traffic.up == len(ragged) * (4 * 3 * 4 + 8)  # k e numbers, and the count


def test_bytes_of_federated_fine_tuning(ragged: Clients) -> None:
    module = DenseAutoencoder(hidden=4, code=3).build(ragged.shape)
    _, fed, _ = started(
        FLT(k=1, manifold="none", fine_tune_epochs=2, encoder_module=module), ragged
    )
    both, encoder = (nbytes(dict(part.named_parameters())) for part in (module, module.encoder))
    assert fed.traffic.down == len(ragged) * (2 * both + encoder)
    assert fed.traffic.up == len(ragged) * (2 * both + 3 * 4 + 8)


def test_a_client_fine_tunes_locally_and_sends_only_its_signature(ragged: Clients) -> None:
    module = DenseAutoencoder(hidden=4, code=3).build(ragged.shape)
    _, fed, state = started(
        FLT(k=1, manifold="none", fine_tune="client", encoder_module=module), ragged
    )
    plain = started(FLT(k=1, manifold="none", fine_tune="none", encoder_module=module), ragged)[2]
    assert fed.traffic.up == len(ragged) * (3 * 4 + 8)
    assert fed.traffic.down == len(ragged) * nbytes(dict(module.named_parameters()))
    assert not torch.equal(state.centres, plain.centres)
    for name, value in module.state_dict().items():
        assert torch.equal(state.encoder[name], value)


def test_auto_fine_tunes_random_weights_only(ragged: Clients) -> None:
    for pretrained in (False, True):
        module = DenseAutoencoder(hidden=4, code=3).build(ragged.shape)
        module.pretrained = pretrained
        state = started(small(encoder_module=module), ragged)[2]
        unchanged = all(
            torch.equal(state.encoder[name], value) for name, value in module.state_dict().items()
        )
        assert unchanged is pretrained
    assert Encoder(nn.Linear(6, 2)).tuning("auto") == "none"


# --- the clients' programs


def test_autoencode_is_adam_on_the_reconstruction() -> None:
    torch.manual_seed(0)
    module, x = DenseAutoencoder(hidden=4, code=2).build((5,)), torch.randn(7, 5)
    encoder = Encoder(module)
    fed = Simulator(from_arrays([(x, torch.zeros(7)), (x[:3], torch.zeros(3))]))
    got = fed.map(
        autoencode(encoder, 4),
        torch.tensor([0, 1]),
        broadcast=add_prefix("encoder", encoder.weights()),
        key=0,
    )
    optimiser = torch.optim.Adam(module.parameters(), lr=1e-3)
    for _ in range(4):
        optimiser.zero_grad()
        ((module(x) - x) ** 2).mean().backward()
        optimiser.step()
    for name, value in module.state_dict().items():
        torch.testing.assert_close(got.outputs[name][0], value, atol=1e-6, rtol=1e-5)


def test_a_signature_has_as_many_centres_as_a_client_has_different_samples() -> None:
    x = torch.tensor([[0.0], [0.0], [5.0], [9.0], [9.1]])
    clients = from_arrays(
        [
            (x[:1], torch.zeros(1)),
            (x[:2], torch.zeros(2)),
            (x[:4], torch.zeros(4)),
            (x, torch.zeros(5)),
        ]
    )
    got = Simulator(clients).map(signature(Encoder(nn.Flatten()), 3), torch.arange(4), key=0)
    assert got.outputs["count"].tolist() == [1, 1, 3, 3]
    assert got.outputs["centres"].shape == (4, 3, 1)
    assert sorted(got.outputs["centres"][3].flatten().tolist()) == pytest.approx([0.0, 5.0, 9.05])
    assert got.outputs["centres"][0].flatten().tolist() == [0.0, 0.0, 0.0]


def test_a_signature_depends_on_the_client_and_the_key_alone(digits: Clients) -> None:
    encoder = Encoder(resolve("default", digits.shape, 0))
    broadcast = add_prefix("encoder", encoder.weights())
    fed = Simulator(digits)
    everyone = fed.map(signature(encoder, 4), torch.arange(20), broadcast=broadcast, key=3).outputs[
        "centres"
    ]
    some = fed.map(
        signature(encoder, 4), torch.tensor([12, 5]), broadcast=broadcast, key=3
    ).outputs["centres"]
    assert torch.equal(some, everyone[[12, 5]])


@pytest.mark.parametrize("groups", [2, 3, 5])
def test_auto_picks_the_number_of_centres_by_silhouette(groups: int) -> None:
    rng = np.random.default_rng(groups)
    codes = (
        np.repeat(20 * rng.normal(size=(groups, 6)), 30, 0) + rng.normal(size=(groups * 30, 6))
    ).astype(np.float32)
    assert len(centres_of(codes, "auto", seed=0)) == groups


def test_auto_with_hardly_any_samples() -> None:
    for size, expected in ((1, 1), (2, 2), (3, 2)):
        assert (
            len(centres_of(np.arange(size, dtype=np.float32)[:, None], "auto", seed=0)) == expected
        )
    assert len(centres_of(np.zeros((6, 2), dtype=np.float32), "auto", seed=0)) == 1


def test_auto_pads_to_one_shape(ragged: Clients) -> None:
    state = started(FLT(k="auto", manifold="none"), ragged)[2]
    assert state.centres.shape[1] == MOST_CENTRES
    assert state.counts.min() == 1
    assert state.counts.max() > 1


def test_embeddings_that_are_not_finite_are_rejected() -> None:
    class Root(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sqrt()

    x = torch.tensor([[1.0], [2.0], [-1.0]])
    clients = from_arrays([(x[:2], torch.zeros(2)), (x, torch.zeros(3))])
    got = Simulator(clients).map(signature(Encoder(Root()), 2), torch.arange(2), key=0)
    assert got.ids.tolist() == [0]
    assert [failure.client for failure in got.failures] == [1]


def test_a_reply_with_too_many_centers_does_no_harm(ragged: Clients) -> None:
    def boast(key: int, client: int, reply: Tree) -> Tree:
        return reply | {"count": torch.tensor(10**6)} if client == 2 and "count" in reply else reply

    assert started(small(), ragged, faults=boast)[2].counts[2] == 2


class Statistics(nn.Module):
    """An encoder with a buffer and no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(3.0))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([x.mean(1), x.std(1)], 1) * self.scale


def about_encoder(error: InvalidInputError) -> bool:
    return error.field == "method.encoder"


def test_any_module_is_an_encoder(ragged: Clients) -> None:
    _, _, state = started(small(encoder_module=Statistics()), ragged)
    assert state.centres.shape[2] == 2
    with pytest.raises(InvalidInputError, match="`encode`", check=about_encoder):
        started(small(encoder_module=Statistics(), fine_tune="client"), ragged)


def test_integers_cannot_be_reconstructed() -> None:
    tokens = from_arrays([(torch.randint(0, 9, (5, 4)), torch.zeros(5)) for _ in range(2)])
    with pytest.raises(InvalidInputError, check=about_encoder):
        inject_context(small(), tokens.metadata, 0).init(
            Simulator(tokens), {"w": torch.zeros(1)}, key=0
        )


def test_it_needs_an_encoder(ragged: Clients) -> None:
    with pytest.raises(FedcladeError, check=lambda error: error.field == "encoder_module"):
        FLT().init(Simulator(ragged), {"w": torch.zeros(1)}, key=0)


# --- signatures in noise


def test_finds_the_groups_of_digits_through_noise_until_there_is_too_much(digits: Clients) -> None:
    scores = []
    for epsilon in (30.0, 0.1):
        _, _, state = started(small(k=1, clusters=5, signature_epsilon=epsilon), digits)
        scores.append(adjusted_rand_score(digits.groups, state.cluster_ids))
    assert scores[0] == 1.0
    assert scores[1] < 0.3


def test_with_noise_only_the_mean_and_its_count_leave_a_client(digits: Clients) -> None:
    """Random weights are not fine-tuned then: that would send what was trained on the examples."""
    _, fed, state = started(small(k=1, signature_epsilon=1.0), digits)
    assert state.centres.shape == (20, 1, 64)
    assert fed.traffic.up == 20 * (64 * 4 + 8)


def test_a_new_client_that_replied_before_sends_the_same_reply(digits: Clients) -> None:
    method, fed, state = started(small(k=1, clusters=5, signature_epsilon=3.0), digits)
    again = fed.map(
        private_signature(Encoder(method.encoder_module), 1.0, method.noise, 0),
        torch.arange(20),
        broadcast=sent(state),
        key=77,
    )  # type: ignore[attr-defined]
    assert torch.equal(again.outputs["centres"], state.centres)


def sent(state: FLTState) -> Tree:
    return add_prefix(
        "encoder",
        {name: value for name, value in state.encoder.items() if not name.startswith("decoder.")},
    )


def test_private_programs_are_sent_without_the_secret(digits: Clients) -> None:
    method, fed, state = started(
        FLT(k=1, manifold="none", signature_epsilon=1.0, secret=987654321), digits
    )
    encoder = Encoder(method.encoder_module)  # type: ignore[attr-defined]
    words = json.dumps(to_spec(private_signature(encoder, 1.0, method.noise, 987654321)))  # type: ignore[attr-defined]
    assert "987654321" not in words
    there = from_spec(
        json.loads(words), NodeContext(method.local.objective, encoder, secret=987654321)
    )
    assert torch.equal(
        fed.map(there, torch.arange(20), broadcast=sent(state), key=0).outputs["centres"],
        state.centres,
    )


# --- hyper-parameters


@pytest.mark.parametrize(
    ("settings", "field", "allowed"),
    [
        ({"k": 0}, "k", ("'auto'", "12")),
        ({"k": "many"}, "k", ("'auto'", "12")),
        ({"k": 13}, "k", ("'auto'", "12")),
        ({"gamma": 0.0}, "gamma", ()),
        ({"manifold": "tsne"}, "manifold", ("'umap'", "'pca'", "'none'")),
        ({"absent": "never"}, "absent", ("'last'", "'skip'")),
        ({"fine_tune": "some"}, "fine_tune", ("'auto'", "'client'", "'federated'")),
        ({"manifold_dim": 0}, "manifold_dim", ("1",)),
        ({"fine_tune_epochs": 0}, "fine_tune_epochs", ("1",)),
        ({"clusters": 0}, "clusters", ("1",)),
        ({"clusters": 3, "cut": "gap"}, "clusters", ("cut = 'gap'",)),
        ({"signature_epsilon": -1.0, "k": 1}, "signature_epsilon", ("above 0",)),
        ({"signature_epsilon": float("inf"), "k": 1}, "signature_epsilon", ("above 0",)),
        ({"signature_delta": 0.0}, "signature_delta", ("0 and 1",)),
        ({"signature_clip": float("nan")}, "signature_clip", ("above 0",)),
        ({"signature_epsilon": 1.0}, "signature_epsilon", ("k = 1",)),
        ({"signature_epsilon": 1.0, "k": "auto"}, "signature_epsilon", ("k = 1",)),
        (
            {"signature_epsilon": 1.0, "k": 1, "fine_tune": "client"},
            "signature_epsilon",
            ("k = 1", "'none'", "'auto'"),
        ),
        (
            {"signature_epsilon": 1.0, "k": 1, "fine_tune": "federated"},
            "signature_epsilon",
            ("k = 1", "'none'", "'auto'"),
        ),
    ],
)
def test_hyper_parameters_are_checked(
    settings: dict[str, Any], field: str, allowed: tuple[str, ...]
) -> None:
    with pytest.raises(InvalidInputError) as caught:
        FLT(**settings)
    assert caught.value.field == f"method.{field}"
    for part in (repr(settings[field]), *allowed):
        assert part in str(caught.value)


def test_more_centers_are_allowed_without_matching() -> None:
    assert FLT(k=40, distance="chamfer").k == 40


# --- encoders


def test_the_shipped_encoder_is_small_and_trained() -> None:
    module = resolve("default", (1, 28, 28), seed=0)
    assert module.pretrained
    assert sum(value.numel() for value in module.parameters()) == 51_577
    path = Path(encoders.__file__).parents[1] / "models" / "pretrained" / encoders.SHIPPED
    assert path.stat().st_size < 250_000


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((3, 32, 32), ResidualAutoencoder(code=128)),
        ((1, 28, 28), ConvAutoencoder(128)),
        ((1, 30, 28), DenseAutoencoder(code=128)),
        ((1, 8, 8), DenseAutoencoder(code=64)),
        ((6,), DenseAutoencoder(code=6)),
        ((2, 5), DenseAutoencoder(code=10)),
    ],
)
def test_the_form_of_an_encoder_follows_the_shape(shape: tuple[int, ...], spec: object) -> None:
    assert spec_for(shape) == spec
    module = spec_for(shape).build(shape)
    x = torch.rand(3, *shape)
    assert module(x).shape == x.shape
    assert module.encode(x).shape == (3, spec.code)  # type: ignore[attr-defined]


def test_random_weights_come_from_the_seed() -> None:
    one, same, other = (resolve("default", (6,), seed).state_dict() for seed in (1, 1, 2))
    assert not resolve("default", (6,), 1).pretrained
    assert all(torch.equal(value, same[name]) for name, value in one.items())
    assert not any(torch.equal(value, other[name]) for name, value in one.items())


def test_a_method_with_an_encoder_or_without_need_does_not_change(ragged: Clients) -> None:
    module = nn.Linear(6, 2)
    for method in (FedAvg(), FLT(encoder_module=module)):
        assert inject_context(method, ragged.metadata, 0) is method


def tiny_images(count: int = 64) -> fc.data.Dataset:
    generator = torch.Generator().manual_seed(0)
    x = (torch.rand(count, 1, 6, 6, generator=generator) * 255).to(torch.uint8)
    return fc.data.dataset(x, torch.zeros(count, dtype=torch.int64), name="tiny")


def test_pretraining_lowers_the_loss_and_is_repeatable(tmp_path: Path) -> None:
    losses: list[float] = []
    one = pretrain(
        tiny_images(),
        tmp_path / "a.safetensors",
        epochs=4,
        on_epoch=lambda _, loss: losses.append(loss),
    )
    pretrain(tiny_images(), tmp_path / "b.safetensors", epochs=4)
    assert losses == sorted(losses, reverse=True)
    assert one.pretrained
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    again = resolve(str(tmp_path / "a.safetensors"), (1, 6, 6), seed=5)
    assert again.pretrained
    assert all(
        torch.equal(value, again.state_dict()[name]) for name, value in one.state_dict().items()
    )


def bad_files(folder: Path) -> dict[str, Callable[[], Path]]:
    def text() -> Path:
        path = folder / "text.safetensors"
        path.write_text("not an encoder")
        return path

    def other_tensors() -> Path:
        save_file({"w": torch.zeros(1)}, folder / "other.safetensors")
        return folder / "other.safetensors"

    def other_weights() -> Path:
        path = folder / "weights.safetensors"
        encoders.write(
            path, Autoencoder(nn.Linear(2, 1), nn.Linear(1, 2)), DenseAutoencoder(), (2,), {}
        )
        return path

    return {
        "no such file": lambda: folder / "none.safetensors",
        "damaged": text,
        "not written by this version of fedclade": other_tensors,
        "a damaged": other_weights,
    }


@pytest.mark.parametrize(
    "message", ["no such file", "damaged", "not written by this version of fedclade", "a damaged"]
)
def test_files_without_an_encoder_are_refused(tmp_path: Path, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        read(bad_files(tmp_path)[message]())


def test_an_encoder_for_another_shape_is_refused(tmp_path: Path) -> None:
    pretrain(tiny_images(), tmp_path / "a.safetensors", epochs=1)
    with pytest.raises(InvalidInputError, match=r"\(1, 6, 6\).*\(1, 8, 8\)") as caught:
        resolve(str(tmp_path / "a.safetensors"), (1, 8, 8), seed=0)
    assert caught.value.field == "method.encoder"


@pytest.mark.parametrize(
    "given",
    [{"epochs": 0}, {"batch_size": 0}, {"code": 0}, {"lr": 0.0}, {"out": "no/such/folder/file"}],
)
def test_pretraining_is_checked_before_it_begins(given: dict[str, Any]) -> None:
    (name,) = given
    with pytest.raises(InvalidInputError, check=lambda error: error.field == f"pretrain.{name}"):
        pretrain(tiny_images(), **given)


def test_pretraining_needs_something_to_reconstruct() -> None:
    tokens = fc.data.dataset(
        torch.zeros(4, 3, dtype=torch.int64), torch.zeros(4, dtype=torch.int64), name="words"
    )
    with pytest.raises(InvalidInputError, match="'words'") as caught:
        pretrain(tokens)
    assert caught.value.field == "pretrain.data"


def test_pretraining_on_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "digits.safetensors"
    done = CliRunner().invoke(
        main.app,
        ["pretrain", "--data", "digits", "--out", str(path), "--epochs", "2", "--code", "16"],
    )
    assert done.exit_code == 0
    assert "epoch 2/2  loss 0." in done.output
    assert read(path, (1, 8, 8)).encode(torch.rand(1, 1, 8, 8)).shape == (1, 16)


def test_an_encoder_file_in_a_run(digits: Clients, tmp_path: Path) -> None:
    path = tmp_path / "digits.safetensors"
    pretrain("digits", path, epochs=1)
    result = fc.run(
        FLT(encoder=str(path), manifold="none", clusters=5), digits, MLP(8), rounds=1, device="cpu"
    )
    assert result.summary["ari"] == 1.0
    assert result.summary["clusters"] == 5


def test_state_is_all_tensors(ragged: Clients) -> None:
    state = started(small(), ragged)[2]
    again = restore(FLTState, flatten(state))
    assert all(isinstance(value, Tensor) for value in flatten(state).values())
    assert all(torch.equal(value, flatten(again)[name]) for name, value in flatten(state).items())
