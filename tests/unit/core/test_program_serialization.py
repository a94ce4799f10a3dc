"""Programs that another machine makes from names and numbers."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import fedclade as fc
from fedclade.core.batching import Batches
from fedclade.core.functional_encoder import Encoder
from fedclade.core.functional_model import Objective
from fedclade.core.local_sgd import sgd
from fedclade.core.local_training_config import LocalTraining
from fedclade.core.program import Program
from fedclade.core.program_serialization import (
    NodeContext,
    from_spec,
    serializable_program,
    to_spec,
)
from fedclade.methods.fedprox import proximal
from fedclade.programs.encoder_signature import signature as centres
from fedclade.programs.evaluation import evaluate_losses
from fedclade.programs.gradient_signature import signature
from fedclade.programs.model_selection import choose_then
from fedclade.programs.secret_parameter_order import in_secret_order


@pytest.fixture
def objective() -> Objective:
    return Objective(nn.Linear(3, 2))


def test_a_program_is_sent_as_a_name_and_numbers(objective: Objective) -> None:
    sent = to_spec(proximal(LocalTraining(objective, lr=0.1, epochs=3), mu=0.5))
    training = {"lr": 0.1, "batch_size": 10, "epochs": 3, "momentum": 0.0, "weight_decay": 0.0}
    training |= {"optimizer": "sgd", "clip_norm": 0.0, "class_weight": "none", "steps": 0}
    assert sent == {
        "make": "methods.fedprox.proximal",
        "with": {"local": {"training": training}, "mu": 0.5},
    }


def test_the_node_uses_its_own_objective(objective: Objective) -> None:
    other = Objective(nn.Linear(3, 2))
    program = from_spec(
        json.loads(json.dumps(to_spec(sgd(LocalTraining(objective, lr=0.3))))), NodeContext(other)
    )
    assert isinstance(program, Program)
    assert (program.name, program.hyperparams, program.functions) == (
        "sgd",
        {"lr": 0.3},
        sgd(LocalTraining(other, lr=0.3)).functions,
    )


def test_programs_within_programs(objective: Objective) -> None:
    sent = to_spec(choose_then(objective, sgd(LocalTraining(objective)), report_loss=True))
    assert sent["with"]["objective"] == {"here": "objective"}
    assert sent["with"]["train"]["program"]["make"] == "core.local_sgd.sgd"
    assert from_spec(sent, NodeContext(objective)).name == "losses>sgd"


def test_large_keys_and_choices_are_sent_exactly(objective: Objective) -> None:
    sent = json.loads(json.dumps(to_spec(signature(objective, "gradient", 8, 2**61 + 1))))
    assert sent["with"] == {
        "objective": {"here": "objective"},
        "kind": "gradient",
        "size": 8,
        "key": 2**61 + 1,
    }
    assert (
        from_spec(sent, NodeContext(objective)).functions
        == signature(objective, "gradient", 8, 2**61 + 1).functions
    )


def test_a_secret_is_not_sent(objective: Objective) -> None:
    sent = to_spec(in_secret_order(sgd(LocalTraining(objective)), secret=4711))
    assert "4711" not in json.dumps(sent)
    assert (
        from_spec(sent, NodeContext(objective, secret=12)).functions
        == in_secret_order(sgd(LocalTraining(objective)), secret=12).functions
    )
    with pytest.raises(fc.InvalidInputError, check=lambda error: error.field == "secret"):
        from_spec(sent, NodeContext(objective))


def test_the_node_uses_its_own_encoder(objective: Objective) -> None:
    sent = to_spec(centres(Encoder(nn.Flatten()), 2))
    assert sent["with"]["encoder"] == {"here": "encoder"}
    assert from_spec(sent, NodeContext(objective, Encoder(nn.Flatten()))).name == "signature"


def test_an_undeclared_program_is_refused(objective: Objective) -> None:
    own = Program(lambda *_: ({}, {}), lambda *_: {}, lambda *_: ({}, None), Batches(1), "own")
    with pytest.raises(fc.InvalidInputError, match="@serializable_program") as caught:
        to_spec(own)
    assert caught.value.field == "own"


def test_a_program_with_changed_functions_is_refused(objective: Objective) -> None:
    changed = replace(
        evaluate_losses(objective), finish=lambda broadcast, const, carry: ({}, None), name="mine"
    )
    with pytest.raises(fc.InvalidInputError, match=r"programs\.evaluation\.") as caught:
        to_spec(changed)
    assert caught.value.field == "mine"


def test_a_users_program_can_be_sent(objective: Objective) -> None:
    @serializable_program
    def silent(objective: Objective, words: tuple[str, ...]) -> Program:
        return replace(evaluate_losses(objective), finish=_nothing, name=words[0])

    sent = json.loads(json.dumps(to_spec(silent(objective, ("a", "b")))))
    assert sent["with"]["words"] == {"tuple": ["a", "b"]}
    assert (
        from_spec(sent, NodeContext(objective)).functions == silent(objective, ("a", "b")).functions
    )


def _nothing(
    broadcast: object, const: object, carry: object
) -> tuple[dict[str, torch.Tensor], None]:
    return {}, None


@pytest.mark.parametrize(
    ("sent", "field"),
    [
        ({}, "program"),
        ([], "program"),
        ({"make": "os.system", "with": {"command": "true"}}, "os.system"),
        ({"make": "core.local_sgd.sgd", "with": {}}, "core.local_sgd.sgd"),
        (
            {"make": "core.local_sgd.sgd", "with": {"local": {"training": {"lr": 1.0}}}},
            "core.local_sgd.sgd",
        ),
        (
            {
                "make": "programs.evaluation.evaluate_losses",
                "with": {"objective": {"here": "disk"}},
            },
            "programs.evaluation.evaluate_losses",
        ),
    ],
)
def test_an_invalid_description_is_refused(
    sent: dict[str, object], field: str, objective: Objective
) -> None:
    with pytest.raises(fc.InvalidInputError, check=lambda error: error.field == field):
        from_spec(sent, NodeContext(objective))
