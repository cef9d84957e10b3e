"""A forward pass of a model of transformers: arrays of each layer, as its own eager attention has them."""

import functools
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
WAYS = 'interface', 'modules', 'model'  # in which a model shows its attention
# Where configs say how many layers there are; of a decoder that stands alone, num_hidden_layers may be the encoder's.
COUNTS = 'num_hidden_layers', 'decoder_layers', 'num_decoder_layers', 'num_layers'
LOOK = np.zeros((1, 2), np.int64)  # the ids of the first pass: two tokens are enough to recognize causal attention

Layer = dict[str, np.ndarray]  # arrays of one layer, by the names of measure/setting.py less their L


def remember_fault(hook: Callable) -> Callable:
    """Mark an exception of a hook as sinklab's own: it is raised through the model, whose fault it is not."""

    @functools.wraps(hook)
    def wrapped(self: 'Showing', *given: Any) -> Any:
        try:
            return hook(self, *given)
        except Exception as error:
            self.fault = error
            raise

    return wrapped


class Showing:
    """Run a model, and call a function on the arrays of each layer, one layer after another.

    Attention is taken in the first of three ways in which a model shows it: from transformers' attention interface
    ("interface"); of models that do not use it (GPT-J, GPT-Neo, Falcon, Bloom, ...) the attention weights that their
    modules return under eager attention ("modules"); those that the model as a whole returns ("model").
    """

    def __init__(self, model: torch.nn.Module, name: str = ''):
        self.model, self.name, self.layers = model, name, layers_of(model)
        self.layer: Layer = {}
        self.attending: torch.nn.Module | None = None  # the module whose attention is in `layer`
        self.show: Callable[[Layer], Any] = dict
        self.shown: list[Any] = []
        self.numbers: list[int] = []  # of the layers of `shown`, from 1
        self.number = 1  # of the layer that is running
        self.length = 0  # of the texts
        self.fault: Exception | None = None  # of our own, in this pass
        self.way = 'interface' if model.config._attn_implementation == SEEN else 'modules'
        self.looking = False
        self.weights: dict[torch.nn.Module, int] = {}  # modules that return attention weights -> at which place
        for part in self.layers:
            part.register_forward_hook(self.after_layer)
            for inner in part.modules():
                if 'attention' in type(inner).__name__.lower():
                    inner.register_forward_pre_hook(self.before_attention, with_kwargs=True)

    def look(self) -> list[Layer]:
        """Return the arrays of each layer for two tokens, by whichever way the model shows its attention.

        Raises:
            Refusal: the model cannot be run, has no attention matrices, or attends to later tokens.
        """
        refusal = Refusal(
            f'{self.name} ({type(self.model).__name__}) has no attention matrices: none of its {len(self.layers)} '
            'layers returns them; give a model with attention'
        )
        for way in WAYS[WAYS.index(self.way) :]:
            self.way = way
            if self.way == 'modules':
                self.find_weights()
            try:
                layers = self(LOOK, dict)
            except Refusal as error:
                refusal = error
                continue
            if found := [layer['attention_PHTS'] for layer in layers if 'attention_PHTS' in layer]:
                if any(attention[..., 0, 1].any() for attention in found):
                    raise Refusal(f'{self.name} attends to later tokens; sinks are measured of causal models alone')
                return layers
        raise refusal

    def find_weights(self) -> None:
        """Run once with eager attention and note which modules return attention weights."""
        self.looking = True
        self.model.config._attn_implementation = 'eager'
        inner = dict.fromkeys(inner for part in self.layers for inner in part.modules())
        hooks = [module.register_forward_hook(self.after_module, prepend=True) for module in inner]
        try:
            self(LOOK, lambda layer: None)
        except Refusal:
            return  # the next pass raises it again
        finally:
            self.looking = False
            for hook in hooks:
                hook.remove()
        for module in self.weights:
            module.register_forward_hook(self.after_module, prepend=True)

    def __call__(self, ids_PT: np.ndarray, show: Callable[[Layer], Any], **how: torch.Tensor) -> list[Any]:
        whole = self.way == 'model'
        self.shown, self.numbers, self.layer, self.show = [], [], {}, dict if whole else show
        self.length, self.number, self.fault, self.attending = ids_PT.shape[1], 1, None, None
        WATCHING.append(self)
        try:
            with torch.inference_mode():
                said = self.model.base_model(
                    input_ids=torch.as_tensor(ids_PT),
                    use_cache=False,
                    output_attentions=self.way != 'interface',
                    **how,
                )
        except Refusal:
            raise
        except Exception as error:
            if error is self.fault:
                raise
            raise cannot_run(self.model, self.name, error) from error
        finally:
            WATCHING.pop()
        return [show(layer) for layer in with_attention(self.shown, said)] if whole else self.shown

    def is_watched(self) -> bool:
        return bool(WATCHING) and WATCHING[-1] is self

    @remember_fault
    def before_attention(self, module: torch.nn.Module, given: tuple, named: dict) -> None:
        read = given[0] if given else named.get('hidden_states')
        if self.is_watched() and isinstance(read, torch.Tensor):
            self.layer['normed_PTD'] = read.numpy()

    @remember_fault
    def after_module(self, module: torch.nn.Module, given: tuple, output: Any) -> None:
        """Keep the attention weights that a module returns beside its output."""
        if not self.is_watched():
            return
        parts = [*outputs(output)]
        if self.looking:
            found = [at for at, part in enumerate(parts) if is_attention(part)]
            if found:
                self.weights.setdefault(module, found[0])
        elif 'attention_PHTS' not in self.layer:  # modules are nested, and the innermost returns first
            self.layer['attention_PHTS'] = parts[self.weights[module]].numpy()

    @remember_fault
    def attended(self, module, query, key, value, scaling, output, attention) -> None:
        """Queries, keys, values are (P, H, T, K), outputs (P, T, H, K); keys of a group of heads are repeated."""
        if self.attending not in (None, module):  # a layer with two attentions, one after another
            normed = {name: self.layer[name] for name in ('normed_PTD',) if name in self.layer}
            self.append({name: array for name, array in self.layer.items() if name not in normed})
            self.layer = normed
        self.attending = module
        groups, width = query.shape[1] // key.shape[1], query.shape[-1]
        if scaling is not None and scaling * width**0.5 != 1:  # scores are <q, k> / sqrt(K) here
            query = query * (scaling * width**0.5)
        key, value = (array.repeat_interleave(groups, 1) if groups > 1 else array for array in (key, value))
        of_heads = dict(query_PTHK=query, key_PSHK=key, value_PSHK=value)
        self.layer |= {name: array.transpose(1, 2).numpy() for name, array in of_heads.items()}
        self.layer |= dict(attention_PHTS=attention.numpy(), head_PTHK=output.numpy())

    @remember_fault
    def after_layer(self, module: torch.nn.Module, given: tuple, output: Any) -> None:
        if not self.is_watched():  # the model is asked for something else
            return
        residual = next(outputs(output), None)
        # Gemma 3n has several streams beside each other, and CPM-Ant puts tokens of its own before a text.
        if isinstance(residual, torch.Tensor) and residual.ndim == 3 and residual.shape[1] == self.length:
            self.layer['residual_PTD'] = residual.numpy()
        self.append(self.layer)
        self.layer, self.attending, self.number = {}, None, self.number + 1

    def append(self, layer: Layer) -> None:
        self.shown.append(self.show(layer))
        self.numbers.append(self.number)


def with_attention(layers: list[Layer], said: Any) -> Iterator[Layer]:
    """Yield the layers with the attention weights that the model returns, if it returns as many as it has layers."""
    attentions = getattr(said, 'attentions', None) or ()
    for at, layer in enumerate(layers):
        attention = attentions[at] if len(attentions) == len(layers) else None
        yield layer if attention is None else layer | dict(attention_PHTS=attention.numpy())


def outputs(output: Any) -> Iterator[Any]:
    """Yield what a module returns: a tensor, a tuple or list, or the values of a mapping."""
    if isinstance(output, dict):
        yield from output.values()
    elif isinstance(output, tuple | list):
        yield from output
    else:
        yield output


def is_attention(value: Any) -> bool:
    """Return whether something is attention weights of LOOK: (1, H, 2, 2), rows of shares that sum to at most 1.

    Keys, values and states of linear attention have four axes as well, and are not this.
    """
    if not isinstance(value, torch.Tensor) or value.ndim != 4 or value.shape[0] != 1 or value.shape[2:] != (2, 2):
        return False
    mass = value.sum(-1)
    return bool((value >= 0).all() and (mass > 0).all() and (mass < 1 + 1e-4).all())


def cannot_run(model: torch.nn.Module, name: str, error: Exception) -> Refusal:
    """Return what is said of an exception that transformers raises while a model runs."""
    return Refusal(
        f'{name} (model type {model.config.model_type}) cannot be run by transformers {transformers.__version__}: '
        f'{reason(error)}; give another model'
    )


def reason(error: Exception) -> str:
    """Return the type and message of an exception on one line."""
    return f'{type(error).__name__}: {" ".join(str(error).split())[:300]}'


def layers_of(model: torch.nn.Module) -> torch.nn.ModuleList:
    """Return the list of a model's layers: the first list of as many modules as its config has layers.

    Lists within lists (the experts of a layer, the two attentions of a LongCat layer) are not looked at.
    """
    config = model.config.get_text_config()
    counts = [count for count in (getattr(config, name, None) for name in COUNTS) if isinstance(count, int)]
    lists = [part for part in model.modules() if isinstance(part, torch.nn.ModuleList)]
    inner = {id(part) for one in lists for part in one.modules() if part is not one}
    lists = [part for part in lists if id(part) not in inner]
    for count in counts:
        if found := [part for part in lists if len(part) == count]:
            return found[0]
    raise Refusal(
        f'{type(model).__name__} (model type {config.model_type}) has no list of {counts[0] if counts else "its"} '
        'layers; give another model'
    )


def seen(module: torch.nn.Module, query, key, value, attention_mask=None, **options: Any) -> tuple[Any, Any]:
    """Eager attention as a model's own file defines it."""
    eager: Callable = sys.modules[type(module).__module__].eager_attention_forward
    output, attention = eager(module, query, key, value, attention_mask, **options)
    if WATCHING:
        WATCHING[-1].attended(module, query, key, value, options.get('scaling'), output, attention)
    return output, attention


transformers.AttentionInterface.register(SEEN, seen)
transformers.AttentionMaskInterface.register(SEEN, ALL_MASK_ATTENTION_FUNCTIONS['eager'])
