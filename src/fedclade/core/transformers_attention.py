"""Attention of Hugging Face models that runs on many clients at once.

The library leaves a mask out where it masks nothing. Whether it does depends on the values of the
mask, so clients cannot share a step. Here the mask is always made.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

_NAME = "fedclade"


def always_make_masks(module: nn.Module) -> None:
    """Set the attention of all Hugging Face models in `module`, in place."""
    library = sys.modules.get("transformers.modeling_utils")
    if library is None:
        return  # the module is not from there
    models = [layer for layer in module.modules() if isinstance(layer, library.PreTrainedModel)]
    models = [model for model in models if model.config._attn_implementation == "sdpa"]
    if models:
        _register()
    for model in models:
        model.set_attn_implementation(_NAME)


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def mask(*args: Any, **kwargs: Any) -> Any:
        skip = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return sdpa_mask(*args, **{**kwargs, **skip})

    AttentionInterface.register(_NAME, sdpa_attention_forward)
    AttentionMaskInterface.register(_NAME, mask)
