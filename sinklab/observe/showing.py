"""A forward pass of a model of transformers: arrays of each layer, as its own eager attention has them."""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import transformers
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from sinklab.record import Refusal

SEEN = 'sinklab_seen'  # the name under which attention is computed and shown
WATCHING: list['Showing'] = []  # whose pass is under way, the innermost last

Layer = dict[str, np.ndarray]  # arrays of one layer, by the names of measure/setting.py less their L


class Showing:
    """pass(ids_PT, show) -> what `show` makes of the arrays of each layer, one after another."""

    def __init__(self, model: torch.nn.Module, count: int):
        self.model, self.layers = model, layers_of(model, count)
        self.layer: Layer = {}
        self.show: Callable[[Layer], Any] = dict
        self.shown: list[Any] = []
        self.as_a_whole = False  # the model goes its own way, and returns what it has attended at the end
        for part in self.layers:
            part.register_forward_hook(self.after_layer)
            for inner in part.modules():
                if 'attention' in type(inner).__name__.lower():
                    inner.register_forward_pre_hook(self.before_attention, with_kwargs=True)

    def look(self) -> set[str]:
        """The names of what the model shows, by whichever way it shows its attention."""
        for self.as_a_whole in (False, True):
            if self.as_a_whole:
                self.model.config._attn_implementation = 'eager'
            names = {name for layer in self(np.zeros((1, 2), np.int64), dict) for name in layer}
            if 'attention_PHTS' in names:
                return names
        raise Refusal(f'{type(self.model).__name__} shows no attention; give another model')

    def __call__(self, ids_PT: np.ndarray, show: Callable[[Layer], Any], **how: torch.Tensor) -> list[Any]:
        self.shown, self.layer, self.show = [], {}, dict if self.as_a_whole else show
        WATCHING.append(self)
        try:
            with torch.inference_mode():
                said = self.model.base_model(
                    input_ids=torch.as_tensor(ids_PT), use_cache=False, output_attentions=self.as_a_whole, **how
                )
        finally:
            WATCHING.pop()
        return [show(layer) for layer in with_attention(self.shown, said)] if self.as_a_whole else self.shown

    def is_watched(self) -> bool:
        return bool(WATCHING) and WATCHING[-1] is self

    def before_attention(self, module: torch.nn.Module, given: tuple, named: dict) -> None:
        read = given[0] if given else named.get('hidden_states')
        if self.is_watched() and isinstance(read, torch.Tensor):
            self.layer['normed_PTD'] = read.numpy()

    def attended(self, query, key, value, scaling, output, attention) -> None:
        """Queries, keys, values are (P, H, T, K), outputs (P, T, H, K); keys of a group of heads are repeated."""
        groups, width = query.shape[1] // key.shape[1], query.shape[-1]
        if scaling is not None and scaling * width**0.5 != 1:  # scores are <q, k> / sqrt(K) here
            query = query * (scaling * width**0.5)
        key, value = (array.repeat_interleave(groups, 1) if groups > 1 else array for array in (key, value))
        of_heads = dict(query_PTHK=query, key_PSHK=key, value_PSHK=value)
        self.layer |= {name: array.transpose(1, 2).numpy() for name, array in of_heads.items()}
        self.layer |= dict(attention_PHTS=attention.numpy(), head_PTHK=output.numpy())

    def after_layer(self, module: torch.nn.Module, given: tuple, output: Any) -> None:
        if not self.is_watched():  # the model is asked for something else
            return
        residual = output[0] if isinstance(output, tuple) else output
        self.shown.append(self.show(self.layer | dict(residual_PTD=residual.numpy())))
        self.layer = {}


def with_attention(layers: list[Layer], said: Any) -> Iterator[Layer]:
    for layer, attention in zip(layers, said.attentions or [None] * len(layers), strict=True):
        yield layer if attention is None else layer | dict(attention_PHTS=attention.numpy())


def layers_of(model: torch.nn.Module, count: int) -> torch.nn.ModuleList:
    found = [part for part in model.modules() if isinstance(part, torch.nn.ModuleList) and len(part) == count]
    if not found:
        raise Refusal(f'{type(model).__name__} has no list of {count} layers; give another model')
    return found[0]


def seen(module: torch.nn.Module, query, key, value, mask, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Eager attention as a model's own file defines it."""
    eager: Callable = sys.modules[type(module).__module__].eager_attention_forward
    output, attention = eager(module, query, key, value, mask, **options)
    if WATCHING:
        WATCHING[-1].attended(query, key, value, options.get('scaling'), output, attention)
    return output, attention


transformers.AttentionInterface.register(SEEN, seen)
transformers.AttentionMaskInterface.register(SEEN, ALL_MASK_ATTENTION_FUNCTIONS['eager'])
