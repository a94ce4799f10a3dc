"""Models of Hugging Face's transformers, with LoRA adapters of peft.

With an adapter, a client trains and sends the adapter alone. The frozen weights exist once,
whatever the number of clients.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import warnings
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fedclade.errors import InvalidInputError, require, require_int
from fedclade.io import safe_read

if TYPE_CHECKING:
    from peft import PeftModel

_MAX_RANK = 2**16


@dataclass(frozen=True)
class LoRA:
    """Low-rank adapters: each target layer with the weight W computes with W + (alpha / r) B A,
    where A has r rows and B has r columns. A and B are trained, W is not.

    Args:
        r: The rank.
        alpha: The scale of the adapter, relative to the rank.
        dropout: The share of the adapter's inputs that training drops.
        targets: The ends of the names of the target layers, such as ("query", "value"); None for
            peft's choice for the model's architecture.
        train_head: Whether to train the classifier of a model for sequence classification too. The
            output layer of a language model stays frozen.

    Example:
        >>> import fedclade as fc
        >>> adapter = fc.LoRA(r=4, targets=("query", "value"))
    """

    r: int = 8
    alpha: float = 16
    dropout: float = 0.0
    targets: tuple[str, ...] | None = None
    train_head: bool = True

    def __post_init__(self) -> None:
        require_int("lora.r", self.r, 1, _MAX_RANK)
        require(
            _is_number(self.alpha) and self.alpha > 0,
            "lora.alpha",
            self.alpha,
            "must be a number above 0",
        )
        require(
            _is_number(self.dropout) and 0 <= self.dropout < 1,
            "lora.dropout",
            self.dropout,
            "must be at least 0 and below 1",
        )
        if isinstance(self.targets, list):
            object.__setattr__(self, "targets", tuple(self.targets))
        require(
            self.targets is None
            or (
                isinstance(self.targets, tuple)
                and len(self.targets) > 0
                and all(isinstance(target, str) and target for target in self.targets)
            ),
            "lora.targets",
            self.targets,
            "must be a tuple of layer names such as ('query', 'value'), or None",
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def from_transformers(
    model: nn.Module | str | os.PathLike[str],
    lora: LoRA | None = None,
    classes: int | None = None,
) -> nn.Module:
    """A model of transformers for `fc.run`, with an adapter if `lora` is given.

    Args:
        model: A model of transformers, which is changed in place if `lora` is given; or the folder
            of a saved one (`save_pretrained`), whose weights must be in safetensors. Nothing is
            downloaded.
        lora: The adapter; None to train all weights.
        classes: For a folder, the number of classes: the model classifies sequences, with a new
            classifier if the saved one has none for that number. None for the saved architecture
            as it is.

    Returns:
        The model, in float32. With `lora` a model of peft, of which only the adapter (and the
            classifier) has `requires_grad`.
    """
    if isinstance(model, str | os.PathLike):
        model = _read(Path(model), classes)
    elif not isinstance(model, nn.Module):
        raise InvalidInputError(
            f"model = {model!r}: give a model of transformers, or the folder of a saved one.",
            "model",
        )
    elif classes is not None:
        raise InvalidInputError(
            f"classes = {classes}: only for a folder. The given model has its outputs already.",
            "classes",
        )
    return model if lora is None else _with_adapter(model, lora)


def _read(folder: Path, classes: int | None) -> nn.Module:
    """The model in a folder, without pickled files and without code from the folder."""
    transformers = _extra("transformers")
    if not (folder / "config.json").is_file():
        what = "it has no config.json" if folder.is_dir() else "there is no such folder"
        raise InvalidInputError(
            f"model = '{folder}': {what}. Give a folder that save_pretrained wrote; nothing is"
            " downloaded.",
            "model",
        )
    if not any(folder.glob("*.safetensors")):
        raise InvalidInputError(
            f"model = '{folder}': it has no weights in safetensors. Pickled weights"
            " (pytorch_model.bin) can run code and are not read: save the model again with"
            " save_pretrained.",
            "model",
        )
    if classes is not None:
        require_int("classes", classes, 1, 10**6)
    safe_read.allow(folder / "config.json", safe_read.size(folder / "config.json"), 1 << 20)
    # Without remote code: a folder may name Python files that transformers would run.
    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    labels = {} if classes is None else {"num_labels": classes}
    try:
        config = transformers.AutoConfig.from_pretrained(folder, **local, **labels)
        kind = _class_of(transformers, config, classes)
        with torch.device("meta"):  # the sizes, without their memory
            empty = kind._from_config(config)
        safe_read.fit(folder, sum(value.nbytes for value in empty.parameters()))
        loaded: nn.Module = kind.from_pretrained(
            folder,
            config=config,
            local_files_only=True,
            use_safetensors=True,
            ignore_mismatched_sizes=classes is not None,
        )
    except InvalidInputError:
        raise
    # transformers raises many classes of errors for a folder that is not a model
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise InvalidInputError(
            f"model = '{folder}': transformers cannot read it ({reason}).", "model"
        ) from error
    return loaded.float().eval()


def _class_of(transformers: Any, config: Any, classes: int | None) -> Any:
    if classes is not None:
        return transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)]
    name = next(iter(config.architectures or ()), None)
    kind = getattr(transformers, name, None) if isinstance(name, str) else None
    if not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedModel):
        raise ValueError(f"architectures in config.json names no model: {name!r}")
    return kind


def _with_adapter(model: nn.Module, lora: LoRA) -> PeftModel:
    peft = _extra("peft")
    if isinstance(model, peft.PeftModel):
        raise InvalidInputError(
            "lora: the model has an adapter already. Leave lora out, or give the model without its"
            " adapter.",
            "lora",
        )
    kind = type(model).__name__
    task = None
    if kind.endswith("ForSequenceClassification") and lora.train_head:
        task = "SEQ_CLS"  # peft then trains the classifier too, and exports it
    elif kind.endswith(("ForCausalLM", "LMHeadModel")):
        task = "CAUSAL_LM"
    _check_targets(model, lora)
    config = peft.LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=None if lora.targets is None else list(lora.targets),
        task_type=task,
    )
    try:
        with warnings.catch_warnings():
            # peft corrects fan_in_fan_out for the layers of GPT-2, with a warning.
            warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False")
            adapted: PeftModel = peft.get_peft_model(model, config)
    except ValueError as error:
        reason = next(iter(str(error).strip().splitlines()), "")
        if lora.targets is None:
            reason = f"peft has no default for {type(model).__name__}."
        raise InvalidInputError(
            f"lora.targets = {lora.targets!r}: {reason} {_candidates(model)}", "lora.targets"
        ) from error
    return adapted


def adapter_description(module: nn.Module) -> dict[str, Any] | None:
    """What an export of adapters needs, as JSON: "config", the content of adapter_config.json, and
    "keys", the name in adapter_model.safetensors of each trained weight. None if the module has no
    model of peft, or trains weights that are no part of its adapter.
    """
    peft = sys.modules.get("peft")  # a model of it has imported it
    adapted = [layer for layer in module.modules() if peft and isinstance(layer, peft.PeftModel)]
    if peft is None or len(adapted) != 1 or not isinstance(adapted[0].active_adapter, str):
        return None
    name = adapted[0].active_adapter
    state = peft.get_peft_model_state_dict(
        adapted[0], adapter_name=name, save_embedding_layers=False
    )
    places = {(value.data_ptr(), value.shape): key for key, value in state.items()}
    trained = {key: value for key, value in module.named_parameters() if value.requires_grad}
    keys = {
        key: places[value.data_ptr(), value.shape]
        for key, value in trained.items()
        if (value.data_ptr(), value.shape) in places
    }
    if keys.keys() != trained.keys():
        return None
    config = copy.copy(adapted[0].peft_config[name])
    config.inference_mode = True
    with TemporaryDirectory() as folder:  # peft has no other way to JSON
        config.save_pretrained(folder)
        content = json.loads((Path(folder) / "adapter_config.json").read_text())
    # These are sets, whose order changes from run to run.
    for field in ("target_modules", "modules_to_save"):
        if isinstance(content.get(field), list):
            content[field].sort()
    return {"config": content, "keys": keys}


def _check_targets(model: nn.Module, lora: LoRA) -> None:
    names = [name for name, _ in model.named_modules()]
    for target in lora.targets or ():
        require(
            any(name == target or name.endswith(f".{target}") for name in names),
            "lora.targets",
            target,
            f"no layer has a name that ends like this. {_candidates(model)}".rstrip("."),
        )


def _candidates(model: nn.Module) -> str:
    layers = dict.fromkeys(
        name.rpartition(".")[2]
        for name, layer in model.named_modules()
        if isinstance(weight := getattr(layer, "weight", None), nn.Parameter)
        and weight.ndim == 2
        and not isinstance(layer, nn.Embedding)
    )
    return f"Layers with a matrix: {', '.join(layers) or 'none'}."


def _extra(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise InvalidInputError(
            f"{name}: it is not installed ({error}); pip install 'fedclade[transformers]'.", name
        ) from error
