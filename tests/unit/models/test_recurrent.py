"""Recurrent networks: equal to torch's layers, by hand, and checked fields."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fedclade as fc
from fedclade.data import from_arrays
from fedclade.errors import InvalidInputError
from fedclade.models import BiLstmTagger, LstmLanguageModel
from fedclade.models.recurrent import Lstm


def size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def torch_lstm(layer: Lstm, inputs: int) -> nn.LSTM:
    """torch's layer with the same weights."""
    expected = nn.LSTM(inputs, layer.hidden, batch_first=True, bidirectional=layer.ways == 2)
    rows = 4 * layer.hidden
    with torch.no_grad():
        for way, suffix in enumerate(("l0", "l0_reverse")[: layer.ways]):
            gates = slice(way * rows, (way + 1) * rows)
            getattr(expected, f"weight_ih_{suffix}").copy_(layer.input.weight[gates])
            getattr(expected, f"weight_hh_{suffix}").copy_(layer.recurrent[way].T)
            getattr(expected, f"bias_ih_{suffix}").copy_(layer.input.bias[gates])
            getattr(expected, f"bias_hh_{suffix}").zero_()
    return expected


SIDE = st.integers(1, 6)


@settings(deadline=None, max_examples=40)
@given(
    batch=SIDE,
    steps=SIDE,
    inputs=SIDE,
    hidden=SIDE,
    ways=st.sampled_from([1, 2]),
    seed=st.integers(0, 2**32),
)
def test_a_layer_equals_torchs_with_the_same_weights(
    batch: int, steps: int, inputs: int, hidden: int, ways: int, seed: int
) -> None:
    torch.manual_seed(seed)
    layer = Lstm(inputs, hidden, ways)
    x = torch.randn(batch, steps, inputs)
    x1, x2 = x.clone().requires_grad_(), x.clone().requires_grad_()
    actual, expected = layer(x1), torch_lstm(layer, inputs)(x2)[0]
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
    error = torch.randn_like(expected)
    torch.testing.assert_close(
        torch.autograd.grad(actual, x1, error),
        torch.autograd.grad(expected, x2, error),
        rtol=1e-4,
        atol=1e-5,
    )


def test_two_steps_by_hand() -> None:
    """One unit. All weights are 1, except the output gate's input weight 2. Biases are 0. Then c =
    σ(a)c + σ(a)tanh(a), h = σ(b)tanh(c).
    """
    layer = Lstm(1, 1)
    with torch.no_grad():
        layer.input.weight.fill_(1.0)[3] = 2.0
        layer.input.bias.zero_()
        layer.recurrent.fill_(1.0)

    def sigmoid(value: float) -> float:
        return 1 / (1 + math.exp(-value))

    c1 = sigmoid(0.5) * math.tanh(0.5)
    h1 = sigmoid(1.0) * math.tanh(c1)
    c2 = sigmoid(-1 + h1) * c1 + sigmoid(-1 + h1) * math.tanh(-1 + h1)
    h2 = sigmoid(-2 + h1) * math.tanh(c2)
    outputs = layer(torch.tensor([[[0.5], [-1.0]]]))
    torch.testing.assert_close(outputs, torch.tensor([[[h1], [h2]]]), rtol=0, atol=1e-6)


def test_the_initial_bias_is_one_for_the_forget_gate_and_zero_for_the_others() -> None:
    bias = Lstm(3, 5, ways=2).input.bias.view(2, 4, 5)
    assert (bias[:, 1] == 1).all()
    assert bias.sum() == 10


@pytest.mark.parametrize("words", [50, 1000])
def test_the_language_model_has_the_documented_number_of_parameters(words: int) -> None:
    assert size(LstmLanguageModel().build((20,), words)) == 229 * words + 248_832


def test_the_tagger_has_the_parameters_of_its_layers() -> None:
    # Each direction of a layer has 4 · units · (inputs + units + 1).
    layers = (
        2 * 4 * 64 * (64 + 64 + 1) + 2 * 4 * 32 * (128 + 32 + 1) + (64 * 64 + 64) + (64 * 30 + 30)
    )
    assert size(BiLstmTagger().build((30, 64), 30)) == layers == 113_374


def test_the_language_model_equals_one_of_torchs_layers() -> None:
    torch.manual_seed(0)
    module = LstmLanguageModel(embedding=5, hidden=4, dropout=0.5).build((6,), 9).eval()
    names = ["words", "dropout1", "lstm1", "dropout2", "lstm2", "dropout3", "fc"]
    assert [name for name, _ in module.named_children()] == names
    words, lstm1, lstm2, fc1 = (
        module.get_submodule(name) for name in ("words", "lstm1", "lstm2", "fc")
    )
    assert isinstance(lstm1, Lstm)
    assert isinstance(lstm2, Lstm)
    x = torch.randint(0, 9, (3, 6))
    expected = fc1(torch_lstm(lstm2, 4)(torch_lstm(lstm1, 5)(words(x))[0])[0])
    torch.testing.assert_close(module(x), expected, rtol=0, atol=1e-5)


def test_the_tagger_equals_one_of_torchs_layers() -> None:
    torch.manual_seed(0)
    module = BiLstmTagger().build((7, 3), 4).eval()
    lstm1, lstm2, fc1, fc2 = (
        module.get_submodule(name) for name in ("lstm1", "lstm2", "fc1", "fc2")
    )
    assert isinstance(lstm1, Lstm)
    assert isinstance(lstm2, Lstm)
    x = torch.randn(2, 7, 3)
    expected = fc2(fc1(torch_lstm(lstm2, 128)(torch_lstm(lstm1, 3)(x)[0])[0]).relu())
    torch.testing.assert_close(module(x), expected, rtol=0, atol=1e-5)


def test_the_outputs_of_a_language_model_do_not_depend_on_later_words() -> None:
    torch.manual_seed(0)
    module = LstmLanguageModel(8, 8).build((6,), 9)
    x = torch.randint(0, 9, (1, 6))
    other = x.clone()
    other[0, 3] = (x[0, 3] + 1) % 9
    differs = (module(x) != module(other)).any(-1)[0]
    assert differs.tolist() == [False, False, False, True, True, True]


def test_every_output_of_a_tagger_depends_on_the_whole_sequence() -> None:
    torch.manual_seed(0)
    module = BiLstmTagger().build((5, 2), 3).eval()
    x = torch.randn(1, 5, 2)
    other = x.clone()
    other[0, 2] += 1
    assert (module(x) != module(other)).any(-1).all()


@pytest.mark.parametrize(
    ("shape", "remedy"), [((), ""), ((0,), ""), ((20, 100), "not a vector"), ((1, 28, 28), "")]
)
def test_the_language_model_needs_sequences_of_words(shape: tuple[int, ...], remedy: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        LstmLanguageModel().build(shape, 10)
    assert caught.value.field == "model"
    parts = ("LstmLanguageModel", "(length,)", "(20,)", f"got {shape}", remedy)
    assert all(part in str(caught.value) for part in parts)


@pytest.mark.parametrize(
    ("shape", "remedy"), [((30,), ": (30, 1)"), ((30, 0), ""), ((3, 32, 32), "")]
)
def test_the_tagger_needs_sequences_of_vectors(shape: tuple[int, ...], remedy: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        BiLstmTagger().build(shape, 10)
    assert caught.value.field == "model"
    parts = ("BiLstmTagger", "(length, features)", "(30, 64)", f"got {shape}", remedy)
    assert all(part in str(caught.value) for part in parts)


@pytest.mark.parametrize(
    "x", [torch.rand(8, 5), torch.zeros(8, 5, dtype=torch.uint8)], ids=["float32", "uint8"]
)
def test_words_must_be_whole_numbers(x: Tensor) -> None:
    clients = from_arrays([(x, torch.zeros(8, 5, dtype=torch.int64))] * 2)
    with pytest.raises(InvalidInputError) as caught:
        fc.run(fc.FedAvg(), clients, LstmLanguageModel(4, 4), rounds=1, device="cpu")
    assert all(part in str(caught.value) for part in ("'words'", "int64", "uint8", "float32"))


@pytest.mark.parametrize("field", ["embedding", "hidden", "layers"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "2"])
def test_widths_and_layers_are_checked(field: str, value: object) -> None:
    with pytest.raises(InvalidInputError, match=f"= {value!r}: ") as caught:
        LstmLanguageModel(**{field: value})  # type: ignore[arg-type]
    assert caught.value.field == f"model.{field}"


@pytest.mark.parametrize("spec", [LstmLanguageModel, BiLstmTagger])
def test_dropout_is_checked(spec: type[LstmLanguageModel] | type[BiLstmTagger]) -> None:
    with pytest.raises(InvalidInputError, check=lambda error: error.field == "model.dropout"):
        spec(dropout=1)


@pytest.mark.parametrize(
    ("spec", "shape"),
    [(LstmLanguageModel(), (5,)), (BiLstmTagger(), (5, 2))],
    ids=["words", "vectors"],
)
def test_classes_are_checked(
    spec: LstmLanguageModel | BiLstmTagger, shape: tuple[int, ...]
) -> None:
    with pytest.raises(InvalidInputError, check=lambda error: error.field == "classes"):
        spec.build(shape, 0)
