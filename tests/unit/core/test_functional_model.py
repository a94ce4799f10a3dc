"""The objective: a model and a loss as pure functions, dropout from counters, and errors that
name the layer and the remedy.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, vmap

from fedclade import FedAvg, run
from fedclade.core.functional_model import Batch, Objective
from fedclade.core.losses import accuracy, cross_entropy
from fedclade.core.pytree import Tree, stack
from fedclade.data import from_arrays
from fedclade.errors import FedcladeWarning, InvalidInputError, VectorizationError

X, Y = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 1])
IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def identity(features: int) -> nn.Linear:
    layer = nn.Linear(features, features, bias=False)
    nn.init.eye_(layer.weight)
    return layer


def keeps_channels(channels: int) -> nn.Conv2d:
    layer = nn.Conv2d(channels, channels, 1, bias=False)
    layer.weight.data = torch.eye(channels)[:, :, None, None]
    return layer


def dropped(objective: Objective, x: Tensor, key: int) -> Tensor:
    return objective.outputs(objective.params(), x, torch.tensor(key))


def batch_of(x: Tensor, y: Tensor, weight: list[float] | None = None, key: int = 0) -> Batch:
    return Batch(
        x, y, torch.ones(len(y)) if weight is None else torch.tensor(weight), torch.tensor(key)
    )


class Named(nn.Module):
    """A layer under a name of two parts: `body.layer`, between two linear layers."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.body = nn.Sequential()
        self.body.add_module("layer", layer)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.body(self.first(x)))
        return out


class Does(nn.Module):
    """A layer that applies a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


# Dropout


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_drops_its_share_and_scales_the_rest(p: float) -> None:
    objective = Objective(nn.Sequential(nn.Dropout(p), identity(200)))
    out = dropped(objective, torch.ones(300, 200), key=3)
    kept = out != 0
    assert float(kept.double().mean()) == pytest.approx(
        1 - p, abs=5 * (p * (1 - p) / kept.numel()) ** 0.5
    )
    torch.testing.assert_close(out[kept], torch.full_like(out[kept], 1 / (1 - p)))


@pytest.mark.parametrize("p", [0.25, 0.5])
def test_dropout2d_drops_whole_feature_maps_of_each_image(p: float) -> None:
    objective = Objective(nn.Sequential(nn.Dropout2d(p), keeps_channels(20)))
    out = dropped(objective, torch.ones(400, 20, 3, 3), key=3).flatten(2)
    assert torch.equal(out.amin(-1), out.amax(-1))
    kept = out[..., 0] != 0
    assert float(kept.double().mean()) == pytest.approx(
        1 - p, abs=5 * (p * (1 - p) / kept.numel()) ** 0.5
    )
    torch.testing.assert_close(out[kept], torch.full_like(out[kept], 1 / (1 - p)))
    assert len(torch.unique(kept, dim=0)) > 100  # each image its own maps


def test_dropout_is_off_without_a_key_even_if_the_module_is_in_training() -> None:
    objective = Objective(nn.Sequential(nn.Dropout(0.5), identity(6)).train())
    assert torch.equal(objective.outputs(objective.params(), X), X)


def test_dropout_is_on_with_a_key_even_if_the_module_was_in_evaluation() -> None:
    objective = Objective(nn.Sequential(nn.Dropout(0.5), identity(6)).eval())
    assert not torch.equal(dropped(objective, X, key=1), X)


def test_dropout_leaves_no_key_behind() -> None:
    objective = Objective(nn.Sequential(nn.Dropout(0.5), identity(6)))
    dropped(objective, X, key=1)
    assert torch.equal(objective.module(X), X)
    with pytest.raises(RuntimeError):
        dropped(objective, torch.ones(2, 7), key=1)
    assert torch.equal(objective.module(X), X)


def test_a_mask_depends_on_its_key_only() -> None:
    objective = Objective(nn.Sequential(nn.Dropout(0.5), identity(6)))
    torch.manual_seed(0)
    one = dropped(objective, X, key=1)
    torch.manual_seed(1)
    assert torch.equal(dropped(objective, X, key=1), one)
    assert not torch.equal(dropped(objective, X, key=2), one)


def test_dropout_draws_nothing_from_torchs_generator() -> None:
    objective = Objective(nn.Sequential(nn.Dropout(0.5), identity(6)))
    before = torch.get_rng_state()
    dropped(objective, X, key=1)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "layer", [nn.Dropout(0.5), nn.Dropout2d(0.5)], ids=["dropout", "dropout2d"]
)
def test_a_mask_does_not_depend_on_other_clients(layer: nn.Module) -> None:
    objective = Objective(nn.Sequential(layer, keeps_channels(3)))
    params, keys = objective.params(), torch.tensor([5, 6, 7])
    together = vmap(lambda key: objective.outputs(params, IMAGES, key))(keys)
    for lane in range(3):
        assert torch.equal(together[lane], dropped(objective, IMAGES, int(keys[lane])))
    assert not torch.equal(together[0], together[1])


def kept_by_two(between: nn.Module) -> float:
    """The share kept where ones pass two layers that drop a half: 1/4 if their masks are
    independent, 1/2 if they are the same.
    """
    objective = Objective(between)
    return float((dropped(objective, torch.ones(200, 200), key=9) != 0).double().mean())


def test_two_dropout_layers_have_independent_masks() -> None:
    assert kept_by_two(
        nn.Sequential(nn.Dropout(0.5), identity(200), nn.Dropout(0.5))
    ) == pytest.approx(0.25, abs=0.015)


def test_one_dropout_layer_in_two_places_is_swapped_in_both() -> None:
    drop = nn.Dropout(0.5)
    module = nn.Sequential(nn.Linear(6, 8), drop, nn.Linear(8, 8), drop, nn.Linear(8, 3))
    Objective(module).check(X, Y)
    assert kept_by_two(nn.Sequential(drop, identity(200), drop)) == pytest.approx(0.25, abs=0.015)


class CallsTwice(nn.Module):
    """As many models do: one dropout layer, called after each hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.layer = nn.Dropout(0.5), identity(200)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.drop(self.layer(self.drop(x)))
        return out


def test_one_dropout_layer_called_twice_draws_two_masks() -> None:
    assert kept_by_two(CallsTwice()) == pytest.approx(0.25, abs=0.015)


def test_dropout_with_share_zero_changes_nothing() -> None:
    assert torch.equal(dropped(Objective(nn.Sequential(nn.Dropout(0.0), identity(6))), X, key=1), X)


def test_dropout_with_share_one_gives_zeros_as_torch_does() -> None:
    assert torch.equal(
        dropped(Objective(nn.Sequential(nn.Dropout(1.0), identity(6))), X, key=1),
        torch.zeros_like(X),
    )


def test_the_users_module_does_not_change() -> None:
    module = nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.5))
    Objective(module)
    assert isinstance(module[1], nn.Dropout)
    assert all(value.requires_grad for value in module.parameters())


def not_vectorized(objective: Objective) -> str:
    """The warning about a model whose clients run one by one."""
    with pytest.warns(FedcladeWarning) as caught:
        objective.check(X, Y)
    (warning,) = caught
    assert isinstance(warning.message, FedcladeWarning)
    assert warning.message.field == "model"
    assert not objective.vectorized
    return str(warning.message)


@pytest.mark.parametrize(
    "layer",
    [nn.AlphaDropout(0.5), nn.FeatureAlphaDropout(0.5)],
    ids=lambda layer: type(layer).__name__,
)
def test_other_dropouts_run_client_by_client_with_a_warning(layer: nn.Module) -> None:
    warning = not_vectorized(Objective(Named(layer)))
    assert f"layer 'body.layer' ({type(layer).__name__})" in warning
    assert "nn.Dropout" in warning


# Loss and parameters


def test_loss_is_the_mean_over_the_real_examples() -> None:
    objective = Objective(nn.Linear(6, 3))
    padded = batch_of(X, Y, [1, 1, 1, 0])
    expected = F.cross_entropy(F.linear(X[:3], *objective.params().values()), Y[:3])
    torch.testing.assert_close(objective.loss(objective.params(), padded), expected)


def test_padding_changes_neither_loss_nor_gradient() -> None:
    objective = Objective(
        nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))
    )
    other_x, other_y = X.clone(), Y.clone()
    other_x[3], other_y[3] = 1000.0, 0
    one, other = batch_of(X, Y, [1, 1, 1, 0]), batch_of(other_x, other_y, [1, 1, 1, 0])
    params = objective.params()
    assert torch.equal(objective.loss(params, one), objective.loss(params, other))
    for name, value in grad(objective.loss)(params, one).items():
        assert torch.equal(value, grad(objective.loss)(params, other)[name])


def test_a_batch_of_padding_alone_costs_nothing() -> None:
    objective = Objective(nn.Linear(6, 3))
    assert float(objective.loss(objective.params(), batch_of(X, Y, [0, 0, 0, 0]))) == 0


def test_the_users_loss_replaces_cross_entropy() -> None:
    objective = Objective(nn.Linear(6, 1), lambda outputs, y: (outputs[:, 0] - y).abs())
    out = F.linear(X, *objective.params().values())[:, 0]
    torch.testing.assert_close(
        objective.loss(objective.params(), batch_of(X, Y.float())), (out - Y).abs().mean()
    )


def test_accuracy_and_cross_entropy_give_one_number_an_example() -> None:
    outputs = torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, 2.0]])
    assert accuracy(outputs, torch.tensor([0, 1])).tolist() == [1.0, 0.0]
    expected = [float(F.cross_entropy(outputs[i : i + 1], torch.tensor([i]))) for i in range(2)]
    assert cross_entropy(outputs, torch.tensor([0, 1])).tolist() == pytest.approx(expected)


def test_frozen_parameters_are_neither_trained_nor_sent_and_still_used() -> None:
    module = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    module[0].requires_grad_(False)
    objective = Objective(module)
    assert list(objective.params()) == ["1.weight", "1.bias"]
    assert list(grad(objective.loss)(objective.params(), batch_of(X, Y))) == ["1.weight", "1.bias"]
    torch.testing.assert_close(objective.outputs(objective.params(), X), module(X).detach())
    objective.check(X, Y)


def test_a_model_with_nothing_to_train_is_refused() -> None:
    with pytest.raises(InvalidInputError, check=lambda error: error.field == "model"):
        Objective(nn.Linear(6, 3).requires_grad_(False))


class Tied(nn.Module):
    """A linear autoencoder whose decoder is the encoder turned over, and a second name for the same
    weights.
    """

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(6, 6, bias=False)
        self.twin = nn.Linear(6, 6, bias=False)
        self.twin.weight = self.encoder.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.twin(torch.tanh(self.encoder(x)))
        return out


def test_tied_weights_are_one_parameter_with_the_gradient_of_both_places() -> None:
    module = Tied()
    objective = Objective(module, lambda outputs, y: ((outputs - y) ** 2).sum(-1))
    objective.check(X, X)
    params = objective.params()
    assert list(params) == ["encoder.weight"]
    ((module(X) - X) ** 2).sum(-1).mean().backward()
    assert module.encoder.weight.grad is not None
    torch.testing.assert_close(
        grad(objective.loss)(params, batch_of(X, X))["encoder.weight"], module.encoder.weight.grad
    )
    changed = {"encoder.weight": params["encoder.weight"] * 2}
    expected = F.linear(
        torch.tanh(F.linear(X, changed["encoder.weight"])), changed["encoder.weight"]
    )
    torch.testing.assert_close(objective.outputs(changed, X), expected)


def test_params_are_a_copy() -> None:
    objective = Objective(nn.Linear(6, 3))
    objective.params()["weight"].zero_()
    assert float(objective.params()["weight"].abs().sum()) > 0


# Refusals


class Features(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 5, 3), norm, nn.ReLU())
        self.head = nn.Linear(5 * 36, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.features(x).flatten(1))
        return out


@pytest.mark.parametrize(
    "norm",
    [nn.BatchNorm2d(5, track_running_stats=False), nn.GroupNorm(5, 5), nn.InstanceNorm2d(5)],
    ids=lambda n: type(n).__name__,
)
def test_norms_without_running_statistics_are_taken(norm: nn.Module) -> None:
    Objective(Features(norm)).check(IMAGES, Y)


def test_random_numbers_of_a_layer_run_client_by_client_with_a_warning() -> None:
    warning = not_vectorized(Objective(Named(Does(lambda x: x + torch.rand_like(x)))))
    assert "layer 'body.layer' (Does)" in warning
    assert "nn.Dropout" in warning


@pytest.mark.parametrize(
    "branch",
    [
        lambda x: x if x.sum() > 0 else -x,
        lambda x: x * x.abs().max().item(),
        lambda x: x[:, torch.arange(int(x.isnan().any()), x.shape[1])],
    ],
    ids=["if", "item", "index"],
)
def test_a_branch_on_data_runs_client_by_client_with_a_warning(
    branch: Callable[[Tensor], Tensor],
) -> None:
    warning = not_vectorized(Objective(Named(Does(branch))))
    assert "layer 'body.layer' (Does)" in warning
    assert "torch.where" in warning


def test_a_branch_in_the_loss_is_not_blamed_on_the_model() -> None:
    def loss(outputs: Tensor, y: Tensor) -> Tensor:
        return outputs[:, 0] if outputs.isnan().any() else cross_entropy(outputs, y)

    with pytest.raises(VectorizationError, match=r"torch\.where") as caught:
        Objective(nn.Linear(6, 3), loss).check(X, Y)
    assert caught.value.field == "loss"


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_that_is_reduced_is_refused_with_the_remedy(reduction: str) -> None:
    objective = Objective(
        nn.Linear(6, 3), lambda outputs, y: F.cross_entropy(outputs, y, reduction=reduction)
    )
    with pytest.raises(InvalidInputError, match=r"\(4,\).*\(\).*reduction='none'") as caught:
        objective.check(X, Y)
    assert caught.value.field == "loss"


def test_a_loss_of_a_number_for_each_output_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"\(4,\).*\(4, 3\)") as caught:
        Objective(nn.Linear(6, 3), lambda outputs, y: outputs - y[:, None]).check(X, Y)
    assert caught.value.field == "loss"


def test_inputs_of_a_wrong_shape_are_refused_with_the_layer_and_the_shape() -> None:
    with pytest.raises(InvalidInputError, match=r"layer 'first' \(Linear\).*\(7,\)") as caught:
        Objective(Named(nn.ReLU())).check(torch.randn(4, 7), Y)
    assert caught.value.field == "model"
    with pytest.raises(InvalidInputError, match=r"layer 'body\.layer' \(Linear\)") as caught:
        Objective(Named(nn.Linear(9, 8))).check(X, Y)
    assert caught.value.field == "model"


def test_a_failed_trial_leaves_no_hook_behind() -> None:
    objective = Objective(Named(Does(lambda x: x if x.sum() > 0 else -x)))
    not_vectorized(objective)
    assert not any(
        layer._forward_hooks or layer._forward_pre_hooks for layer in objective.module.modules()
    )


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cell, self.head = kind(6, 5, batch_first=True), nn.Linear(5, 3)  # type: ignore[call-arg]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.cell(x)[0][:, -1])
        return out


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN], ids=lambda kind: kind.__name__)
def test_a_recurrent_layer_gives_the_right_gradients_or_is_refused_by_name(
    kind: type[nn.RNNBase],
) -> None:
    """Which of the two depends on torch; never a wrong gradient, never a bare error of vmap."""
    objective = Objective(Recurrent(kind))
    series = torch.randn(4, 7, 6, generator=torch.Generator().manual_seed(0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that its fallback is slow
        refused = refusal_of(objective, series)
        if refused is not None:
            assert f"layer 'cell' ({kind.__name__})" in refused
            return
        models = [
            objective.params(),
            {name: value * 0.5 for name, value in objective.params().items()},
        ]
        two = Batch(
            torch.stack([series, series.flip(0)]),
            torch.stack([Y, Y]),
            torch.ones(2, 4),
            torch.arange(2),
        )
        together = vmap(grad(objective.loss))(stack(models), two)
    for lane, params in enumerate(models):
        expected = plain_gradient(Recurrent(kind), params, two.x[lane], Y)
        for name, value in together.items():
            torch.testing.assert_close(value[lane], expected[name], rtol=1e-5, atol=1e-6)


def refusal_of(objective: Objective, x: Tensor) -> str | None:
    try:
        objective.check(x, Y)
    except VectorizationError as refused:
        return str(refused)
    return None


def plain_gradient(module: nn.Module, params: Tree, x: Tensor, y: Tensor) -> Tree:
    module.load_state_dict(params)
    F.cross_entropy(module(x), y).backward()
    return {name: value.grad for name, value in module.named_parameters() if value.grad is not None}


class Held(nn.Module):
    """A model with one layer of another kind."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.layer(x)
        return outputs


@pytest.mark.parametrize(
    "layer",
    [
        nn.LazyLinear(3),
        nn.Sequential(nn.Linear(6, 3), nn.LazyBatchNorm1d(affine=False)),
        torch.jit.script(nn.Linear(6, 3)),  # type: ignore[no-untyped-call]
    ],
    ids=["lazy weights", "lazy statistics", "compiled by torch.jit"],
)
def test_modules_without_copies_are_named(layer: nn.Module) -> None:
    with pytest.raises(InvalidInputError, match="layer 'layer") as caught:
        Objective(Held(layer), x=X)
    assert caught.value.field == "model"
    clients = from_arrays([(X, Y)] * 3)
    with pytest.raises(InvalidInputError, match="layer 'layer"):
        run(FedAvg(), clients, Held(layer), rounds=1)
