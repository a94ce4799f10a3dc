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


def torchs(layer: Lstm, inputs: int) -> nn.LSTM:
    """torch's own layer with the same weights."""
    theirs = nn.LSTM(inputs, layer.hidden, batch_first=True, bidirectional=layer.ways == 2)
    rows = 4 * layer.hidden
    with torch.no_grad():
        for way, end in enumerate(("l0", "l0_reverse")[: layer.ways]):
            of = slice(way * rows, (way + 1) * rows)
            getattr(theirs, f"weight_ih_{end}").copy_(layer.input.weight[of])
            getattr(theirs, f"weight_hh_{end}").copy_(layer.recurrent[way].T)
            getattr(theirs, f"bias_ih_{end}").copy_(layer.input.bias[of])
            getattr(theirs, f"bias_hh_{end}").zero_()
    return theirs


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
def test_a_layer_is_torchs_with_the_same_weights(
    batch: int, steps: int, inputs: int, hidden: int, ways: int, seed: int
) -> None:
    torch.manual_seed(seed)
    ours = Lstm(inputs, hidden, ways)
    theirs = torchs(ours, inputs)
    x = torch.randn(batch, steps, inputs)
    one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    got, expected = ours(one), theirs(other)[0]
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    error = torch.randn_like(expected)
    torch.testing.assert_close(
        torch.autograd.grad(got, one, error),
        torch.autograd.grad(expected, other, error),
        rtol=1e-4,
        atol=1e-5,
    )


def test_two_steps_by_hand() -> None:
    """One unit, all weights 1 but the output gate's input weight 2, biases 0: c = σ(a)c +
    σ(a)tanh(a), h = σ(b)tanh(c).
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
    got = layer(torch.tensor([[[0.5], [-1.0]]]))
    torch.testing.assert_close(got, torch.tensor([[[h1], [h2]]]), rtol=0, atol=1e-6)


def test_the_forget_gates_bias_begins_at_one_and_all_others_at_zero() -> None:
    bias = Lstm(3, 5, ways=2).input.bias.view(2, 4, 5)
    assert (bias[:, 1] == 1).all()
    assert bias.sum() == 10


@pytest.mark.parametrize("words", [50, 1000])
def test_the_language_model_has_the_parameters_it_says(words: int) -> None:
    assert size(LstmLanguageModel().build((20,), words)) == 229 * words + 248_832


def test_the_tagger_has_the_parameters_of_its_layers() -> None:
    # Per way and layer 4 · units · (inputs + units + 1).
    layers = (
        2 * 4 * 64 * (64 + 64 + 1) + 2 * 4 * 32 * (128 + 32 + 1) + (64 * 64 + 64) + (64 * 30 + 30)
    )
    assert size(BiLstmTagger().build((30, 64), 30)) == layers == 113_374


def test_the_language_model_in_torchs_layers() -> None:
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
    expected = fc1(torchs(lstm2, 4)(torchs(lstm1, 5)(words(x))[0])[0])
    torch.testing.assert_close(module(x), expected, rtol=0, atol=1e-5)


def test_the_tagger_in_torchs_layers() -> None:
    torch.manual_seed(0)
    module = BiLstmTagger().build((7, 3), 4).eval()
    lstm1, lstm2, fc1, fc2 = (
        module.get_submodule(name) for name in ("lstm1", "lstm2", "fc1", "fc2")
    )
    assert isinstance(lstm1, Lstm)
    assert isinstance(lstm2, Lstm)
    x = torch.randn(2, 7, 3)
    expected = fc2(fc1(torchs(lstm2, 128)(torchs(lstm1, 3)(x)[0])[0]).relu())
    torch.testing.assert_close(module(x), expected, rtol=0, atol=1e-5)


def test_a_language_model_sees_no_word_before_its_time() -> None:
    torch.manual_seed(0)
    module = LstmLanguageModel(8, 8).build((6,), 9)
    x = torch.randint(0, 9, (1, 6))
    other = x.clone()
    other[0, 3] = (x[0, 3] + 1) % 9
    differs = (module(x) != module(other)).any(-1)[0]
    assert differs.tolist() == [False, False, False, True, True, True]


def test_a_tagger_sees_the_whole_sequence_from_everywhere() -> None:
    torch.manual_seed(0)
    module = BiLstmTagger().build((5, 2), 3).eval()
    x = torch.randn(1, 5, 2)
    other = x.clone()
    other[0, 2] += 1
    assert (module(x) != module(other)).any(-1).all()


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((), "got ()."),
        ((0,), "got (0,)."),
        ((20, 100), "got (20, 100); give the number of each word, not a vector."),
        ((1, 28, 28), "got (1, 28, 28)."),
    ],
)
def test_the_language_model_refuses_what_is_no_sequence_of_words(
    shape: tuple[int, ...], message: str
) -> None:
    with pytest.raises(InvalidInputError) as refused:
        LstmLanguageModel().build(shape, 10)
    assert (
        str(refused.value)
        == f"LstmLanguageModel needs sequences of words (length,), such as (20,), {message}"
    )


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((30,), "got (30,); add the axis of features: (30, 1)."),
        ((30, 0), "got (30, 0)."),
        ((3, 32, 32), "got (3, 32, 32)."),
    ],
)
def test_the_tagger_refuses_what_is_no_sequence_of_vectors(
    shape: tuple[int, ...], message: str
) -> None:
    with pytest.raises(InvalidInputError) as refused:
        BiLstmTagger().build(shape, 10)
    assert (
        str(refused.value)
        == "BiLstmTagger needs sequences of vectors (length, features), such as (30, 64),"
        f" {message}"
    )


@pytest.mark.parametrize(
    "x", [torch.rand(8, 5), torch.zeros(8, 5, dtype=torch.uint8)], ids=["float32", "uint8"]
)
def test_words_that_are_no_whole_numbers_are_refused_before_training(x: Tensor) -> None:
    y = torch.zeros(8, 5, dtype=torch.int64)
    why = (
        r"layer 'words' .*words are to be whole numbers, such as int64 \(uint8 is read as pixels\),"
        r" got float32"
    )
    with pytest.raises(InvalidInputError, match=why):
        fc.run(
            fc.FedAvg(), from_arrays([(x, y)] * 2), LstmLanguageModel(4, 4), rounds=1, device="cpu"
        )


@pytest.mark.parametrize("field", ["embedding", "hidden", "layers"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "2"])
def test_widths_and_layers_are_checked(field: str, value: object) -> None:
    with pytest.raises(
        InvalidInputError, match=rf"^model\.{field} = .* a whole number of at least 1"
    ):
        LstmLanguageModel(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("spec", [LstmLanguageModel, BiLstmTagger])
def test_dropout_is_checked(spec: type[LstmLanguageModel] | type[BiLstmTagger]) -> None:
    with pytest.raises(InvalidInputError, match=r"^model\.dropout = 1: "):
        spec(dropout=1)


@pytest.mark.parametrize(
    ("spec", "shape"),
    [(LstmLanguageModel(), (5,)), (BiLstmTagger(), (5, 2))],
    ids=["words", "vectors"],
)
def test_classes_are_checked(
    spec: LstmLanguageModel | BiLstmTagger, shape: tuple[int, ...]
) -> None:
    with pytest.raises(InvalidInputError, match=r"^classes = 0: .* it is the number of outputs"):
        spec.build(shape, 0)
