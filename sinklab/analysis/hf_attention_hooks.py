"""Forward hooks that record attention and hidden states of each layer of a Hugging Face model."""

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import transformers
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from sinklab.schema import UserError

ATTENTION_NAME = 'sinklab_seen'  # the name of our attention function in transformers' attention interface
ACTIVE_RECORDERS: list['AttentionRecorder'] = []  # recorders with a forward pass in progress, the innermost last
CAPTURE_MODES = 'interface', 'modules', 'model'  # in the order in which they are tried; see AttentionRecorder
# Config fields with the number of layers. In the config of a stand-alone decoder, num_hidden_layers may be the
# number of the encoder's layers.
LAYER_COUNT_FIELDS = 'num_hidden_layers', 'decoder_layers', 'num_decoder_layers', 'num_layers'
# The token ids of the trial pass: two tokens are enough to recognize causal attention.
TRIAL_IDS = np.zeros((1, 2), np.int64)

# Arrays of one layer, under the names of sinklab.metrics.metric without the letter L.
LayerArrays = dict[str, np.ndarray]


def record_hook_error(hook: Callable) -> Callable:
    """Record an exception of a hook, which is raised through the model but is not an error of the model."""

    @functools.wraps(hook)
    def call_hook(self: 'AttentionRecorder', *arguments: Any) -> Any:
        try:
            return hook(self, *arguments)
        except Exception as error:
            self.hook_error = error
            raise

    return call_hook


class AttentionRecorder:
    """A recorder that runs a model and passes the arrays of each layer to a function, layer by layer.

    It captures attention in the first of three modes that works for the model:

    - interface: from transformers' attention interface.
    - modules: the attention weights that modules return under eager attention, for models that do not use the
      interface (GPT-J, GPT-Neo, Falcon, Bloom, ...).
    - model: the attention weights that the model itself returns.
    """

    def __init__(self, model: torch.nn.Module, name: str = ''):
        self.model, self.name, self.layers = model, name, find_layers(model)
        self.layer_arrays: LayerArrays = {}
        self.attending_module: torch.nn.Module | None = None  # the module whose attention is in `layer_arrays`
        self.extract: Callable[[LayerArrays], Any] = dict
        self.outputs: list[Any] = []
        self.layer_numbers: list[int] = []  # for each of `outputs`, the number of its layer, from 1
        self.layer_number = 1  # the layer that is running
        self.length = 0  # tokens of each sequence
        self.hook_error: Exception | None = None  # the exception of one of our hooks in this pass
        self.mode = 'interface' if model.config._attn_implementation == ATTENTION_NAME else 'modules'
        self.is_trial = False
        # For each module that returns attention weights, their position among its outputs.
        self.weight_positions: dict[torch.nn.Module, int] = {}
        for layer in self.layers:
            layer.register_forward_hook(self.on_layer_output)
            for module in layer.modules():
                if 'attention' in type(module).__name__.lower():
                    module.register_forward_pre_hook(self.on_attention_input, with_kwargs=True)

    def run_trial(self) -> list[LayerArrays]:
        """Return the arrays of each layer for two tokens, in the first capture mode that works for the model.

        Raises:
            UserError: The model cannot be run, has no attention matrices, or attends to later tokens.
        """
        user_error = UserError(
            f'{self.name} ({type(self.model).__name__}) has no attention matrices: none of its {len(self.layers)} '
            'layers returns them; give a model with attention'
        )
        for mode in CAPTURE_MODES[CAPTURE_MODES.index(self.mode) :]:
            self.mode = mode
            if self.mode == 'modules':
                self.find_weight_modules()
            try:
                layer_arrays = self(TRIAL_IDS, dict)
            except UserError as error:
                user_error = error
                continue
            if attentions := [layer['attention_PHTS'] for layer in layer_arrays if 'attention_PHTS' in layer]:
                if any(attention[..., 0, 1].any() for attention in attentions):
                    raise UserError(f'{self.name} attends to later tokens; sinks are measured of causal models alone')
                return layer_arrays
        raise user_error

    def find_weight_modules(self) -> None:
        """Run once with eager attention and note which modules return attention weights."""
        self.is_trial = True
        self.model.config._attn_implementation = 'eager'
        submodule = dict.fromkeys(submodule for model_layer in self.layers for submodule in model_layer.modules())
        hooks = [module.register_forward_hook(self.on_module_output, prepend=True) for module in submodule]
        try:
            self(TRIAL_IDS, lambda layer: None)
        except UserError:
            return  # the next pass raises it again
        finally:
            self.is_trial = False
            for hook in hooks:
                hook.remove()
        for module in self.weight_positions:
            module.register_forward_hook(self.on_module_output, prepend=True)

    def __call__(
        self, ids_PT: np.ndarray, extract: Callable[[LayerArrays], Any], **model_kwargs: torch.Tensor
    ) -> list[Any]:
        uses_model_output = self.mode == 'model'
        self.outputs, self.layer_numbers, self.layer_arrays, self.extract = (
            [],
            [],
            {},
            dict if uses_model_output else extract,
        )
        self.length, self.layer_number, self.hook_error, self.attending_module = ids_PT.shape[1], 1, None, None
        ACTIVE_RECORDERS.append(self)
        try:
            with torch.inference_mode():
                output = self.model.base_model(
                    input_ids=torch.as_tensor(ids_PT),
                    use_cache=False,
                    output_attentions=self.mode != 'interface',
                    **model_kwargs,
                )
        except UserError:
            raise
        except Exception as error:
            if error is self.hook_error:
                raise
            raise make_run_error(self.model, self.name, error) from error
        finally:
            ACTIVE_RECORDERS.pop()
        return (
            [extract(layer) for layer in add_model_attentions(self.outputs, output)]
            if uses_model_output
            else self.outputs
        )

    def is_active(self) -> bool:
        return bool(ACTIVE_RECORDERS) and ACTIVE_RECORDERS[-1] is self

    @record_hook_error
    def on_attention_input(self, module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        hidden_states = args[0] if args else kwargs.get('hidden_states')
        if self.is_active() and isinstance(hidden_states, torch.Tensor):
            self.layer_arrays['normed_PTD'] = hidden_states.numpy()

    @record_hook_error
    def on_module_output(self, module: torch.nn.Module, args: tuple, output: Any) -> None:
        """Keep the attention weights that a module returns beside its output."""
        if not self.is_active():
            return
        values = [*iterate_values(output)]
        if self.is_trial:
            positions = [position for position, value in enumerate(values) if is_attention_weights(value)]
            if positions:
                self.weight_positions.setdefault(module, positions[0])
        elif 'attention_PHTS' not in self.layer_arrays:  # modules are nested, and the innermost returns first
            self.layer_arrays['attention_PHTS'] = values[self.weight_positions[module]].numpy()

    @record_hook_error
    def on_attention(self, module, query, key, value, scaling, output, attention) -> None:
        """Store the arrays of one attention call.

        Queries, keys and values are (P, H, T, K), outputs are (P, T, H, K). The keys and values of a group of heads
        are repeated for each head.
        """
        if self.attending_module not in (None, module):  # a layer with two attentions, one after another
            normed = {name: self.layer_arrays[name] for name in ('normed_PTD',) if name in self.layer_arrays}
            self.append_layer({name: array for name, array in self.layer_arrays.items() if name not in normed})
            self.layer_arrays = normed
        self.attending_module = module
        group_size, width = query.shape[1] // key.shape[1], query.shape[-1]
        if scaling is not None and scaling * width**0.5 != 1:  # scores are <q, k> / sqrt(K) here
            query = query * (scaling * width**0.5)
        key, value = (array.repeat_interleave(group_size, 1) if group_size > 1 else array for array in (key, value))
        arrays = dict(query_PTHK=query, key_PSHK=key, value_PSHK=value)
        self.layer_arrays |= {name: array.transpose(1, 2).numpy() for name, array in arrays.items()}
        self.layer_arrays |= dict(attention_PHTS=attention.numpy(), head_PTHK=output.numpy())

    @record_hook_error
    def on_layer_output(self, module: torch.nn.Module, args: tuple, output: Any) -> None:
        if not self.is_active():  # this forward pass is not one of this recorder
            return
        residual = next(iterate_values(output), None)
        # Gemma 3n has several residual streams, and CPM-Ant puts tokens of its own before a text.
        if isinstance(residual, torch.Tensor) and residual.ndim == 3 and residual.shape[1] == self.length:
            self.layer_arrays['residual_PTD'] = residual.numpy()
        self.append_layer(self.layer_arrays)
        self.layer_arrays, self.attending_module, self.layer_number = {}, None, self.layer_number + 1

    def append_layer(self, layer: LayerArrays) -> None:
        self.outputs.append(self.extract(layer))
        self.layer_numbers.append(self.layer_number)


def add_model_attentions(layers: list[LayerArrays], output: Any) -> Iterator[LayerArrays]:
    """Yield the layers with the attention weights that the model returns.

    If the model returns another number of weights than it has layers, the layers stay as they are.
    """
    attentions = getattr(output, 'attentions', None) or ()
    for index, layer in enumerate(layers):
        attention = attentions[index] if len(attentions) == len(layers) else None
        yield layer if attention is None else layer | dict(attention_PHTS=attention.numpy())


def iterate_values(output: Any) -> Iterator[Any]:
    """Yield what a module returns: a tensor, a tuple or list, or the values of a mapping."""
    if isinstance(output, dict):
        yield from output.values()
    elif isinstance(output, tuple | list):
        yield from output
    else:
        yield output


def is_attention_weights(value: Any) -> bool:
    """Return whether a value is attention weights for TRIAL_IDS.

    These have the shape (1, H, 2, 2), and rows that sum to at most 1. Keys, values and states of linear attention
    also have four axes. They do not pass this test.
    """
    if not isinstance(value, torch.Tensor) or value.ndim != 4 or value.shape[0] != 1 or value.shape[2:] != (2, 2):
        return False
    mass = value.sum(-1)
    return bool((value >= 0).all() and (mass > 0).all() and (mass < 1 + 1e-4).all())


def make_run_error(model: torch.nn.Module, name: str, error: Exception) -> UserError:
    """Make the UserError for an exception that transformers raises while a model runs."""
    return UserError(
        f'{name} (model type {model.config.model_type}) cannot be run by transformers {transformers.__version__}: '
        f'{format_exception(error)}; give another model'
    )


def format_exception(error: Exception) -> str:
    """Return the type and message of an exception on one line."""
    return f'{type(error).__name__}: {" ".join(str(error).split())[:300]}'


def find_layers(model: torch.nn.Module) -> torch.nn.ModuleList:
    """Return the first module list of a model with as many modules as its config has layers.

    Nested lists (the experts of a layer, the two attentions of a LongCat layer) are not considered.
    """
    config = model.config.get_text_config()
    counts = [
        count for count in (getattr(config, name, None) for name in LAYER_COUNT_FIELDS) if isinstance(count, int)
    ]
    module_lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    nested_ids = {
        id(module) for module_list in module_lists for module in module_list.modules() if module is not module_list
    }
    module_lists = [module for module in module_lists if id(module) not in nested_ids]
    for count in counts:
        if matching := [module for module in module_lists if len(module) == count]:
            return matching[0]
    raise UserError(
        f'{type(model).__name__} (model type {config.model_type}) has no list of {counts[0] if counts else "its"} '
        'layers; give another model'
    )


def record_eager_attention(
    module: torch.nn.Module, query, key, value, attention_mask=None, **options: Any
) -> tuple[Any, Any]:
    """Compute eager attention by the model's own function; pass its arrays to the active recorder."""
    eager: Callable = sys.modules[type(module).__module__].eager_attention_forward
    output, attention = eager(module, query, key, value, attention_mask, **options)
    if ACTIVE_RECORDERS:
        ACTIVE_RECORDERS[-1].on_attention(module, query, key, value, options.get('scaling'), output, attention)
    return output, attention


transformers.AttentionInterface.register(ATTENTION_NAME, record_eager_attention)
transformers.AttentionMaskInterface.register(ATTENTION_NAME, ALL_MASK_ATTENTION_FUNCTIONS['eager'])
