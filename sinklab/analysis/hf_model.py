"""A Hugging Face model as a measurable model."""

import contextlib
import copy
import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import threadpoolctl
import torch
import transformers

from sinklab.analysis.bos import BosMode
from sinklab.analysis.edits import TARGETS, Edit, add_edits_to_digest, apply_edits, check_sizes
from sinklab.analysis.model_protocol import (
    ExtractFn,
    ProgressFn,
    check_length,
    ignore_progress,
    run_in_batches,
)
from sinklab.errors import UserError, format_error
from sinklab.hf import files, gguf
from sinklab.hf.convert import suppress_transformers_logs
from sinklab.metrics.metric import MetricSetting, complete_arrays

ACTIVE_RECORDERS: list['AttentionRecorder'] = []  # recorders with a forward pass in progress, the innermost last
CAPTURE_MODES = 'interface', 'modules', 'model'  # in the order in which they are tried; see AttentionRecorder
# Config fields with the number of layers. In the config of a stand-alone decoder, num_hidden_layers may be the
# number of the encoder's layers.
LAYER_COUNT_FIELDS = 'num_hidden_layers', 'decoder_layers', 'num_decoder_layers', 'num_layers'
# The token ids of the trial pass: two tokens are enough to recognize causal attention.
TRIAL_IDS = np.zeros((1, 2), np.int64)
CHECKED_QUERY_STEP = 16  # every 16th query is checked
EAGER = 'eager_attention_forward'  # the function of a modeling file that computes attention in the mode `interface`

# Arrays of one layer, under the names of sinklab.metrics.metric without the letter L.
LayerArrays = dict[str, np.ndarray]


class AttentionMismatchError(UserError):
    """The outputs of an attention layer are not the sums of its values with the weights that it returns."""


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

    - interface: from the function EAGER of the model's own code, which models of transformers' attention interface
      have. An implementation with a name of its own would not do: sparse attention (DeepSeek) is dense under a name
      that it does not know.
    - modules: the attention weights that modules return under eager attention, for models that do not use the
      interface (GPT-J, GPT-Neo, Falcon, Bloom, ...).
    - model: the attention weights that the model itself returns.
    """

    def __init__(self, model: torch.nn.Module, name: str = ''):
        self.model, self.name, self.layers = model, name, find_layers(model)
        self.layer_arrays: LayerArrays = {}
        self.attending_module: torch.nn.Module | None = None  # the module whose attention is in `layer_arrays`
        self.extract: Callable[[LayerArrays], Any] | None = dict  # None: no arrays are stored
        self.outputs: list[Any] = []
        self.layer_numbers: list[int] = []  # for each of `outputs`, the number of its layer, from 1
        self.layer_number = 1  # the layer that is running
        self.length = 0  # tokens of each sequence
        self.hook_error: Exception | None = None  # the exception of one of our hooks in this pass
        self.mode = 'interface'
        self.is_trial = False
        self.edits: tuple[Edit, ...] = ()  # of this pass
        module_names = dict.fromkeys(type(module).__module__ for module in model.modules())
        self.code_modules = [sys.modules[name] for name in module_names if hasattr(sys.modules[name], EAGER)]
        # For each module that returns attention weights, their position among its outputs.
        self.weight_positions: dict[torch.nn.Module, int] = {}
        for layer in self.layers:
            layer.register_forward_hook(self.on_layer_output)
            for module in layer.modules():
                if 'attention' in type(module).__name__.lower():
                    module.register_forward_pre_hook(self.on_attention_input, with_kwargs=True)

    def find_capture_mode(self) -> list[LayerArrays]:
        """Return the arrays of each layer for two tokens, in the first capture mode that works for the model.

        Raises:
            UserError: The model cannot be run, has no attention matrices, or attends to later tokens, or its weights
                do not give its outputs.
        """
        user_error = UserError(
            f'{self.name} ({type(self.model).__name__}) has no attention matrices: none of its {len(self.layers)} '
            'layers returns them; give a model with attention'
        )
        for mode in CAPTURE_MODES:
            self.mode = mode
            if self.mode == 'modules':
                self.find_weight_modules()
            try:
                layer_arrays = self(TRIAL_IDS, dict)
            except AttentionMismatchError:
                raise
            except UserError as error:
                user_error = error
                continue
            if attentions := [layer['attention_PHTS'] for layer in layer_arrays if 'attention_PHTS' in layer]:
                if any(attention[..., 0, 1].any() for attention in attentions):
                    raise UserError(f'{self.name} attends to later tokens; give a causal model')
                return layer_arrays
        raise user_error

    def find_weight_modules(self) -> None:
        """Run once with eager attention and note which modules return attention weights."""
        self.is_trial = True
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
        self,
        ids_PT: np.ndarray,
        extract: Callable[[LayerArrays], Any],
        edits: tuple[Edit, ...] = (),
        **model_kwargs: torch.Tensor,
    ) -> list[Any]:
        uses_model_output = self.mode == 'model'
        with self.activate(ids_PT.shape[1], dict if uses_model_output else extract, edits):
            output = self.model.base_model(
                input_ids=torch.as_tensor(ids_PT),
                use_cache=False,
                output_attentions=self.mode != 'interface',
                **model_kwargs,
            )
        return (
            [extract(layer) for layer in add_model_attentions(self.outputs, output)]
            if uses_model_output
            else self.outputs
        )

    @contextlib.contextmanager
    def activate(
        self, length: int, extract: Callable[[LayerArrays], Any] | None, edits: tuple[Edit, ...] = ()
    ) -> Iterator[None]:
        """Capture and edit the forward pass within this context, whose sequences have `length` tokens.

        Raises:
            UserError: transformers cannot run the model.
        """
        self.outputs, self.layer_numbers, self.layer_arrays = [], [], {}
        self.extract, self.edits, self.length, self.layer_number = extract, edits, length, 1
        self.hook_error, self.attending_module = None, None
        ACTIVE_RECORDERS.append(self)
        try:
            with contextlib.ExitStack() as stack:
                for code in self.code_modules if self.mode == 'interface' else ():
                    attend = functools.partial(self.attend, getattr(code, EAGER))
                    stack.enter_context(replaced_attributes(code, {EAGER: attend}))
                stack.enter_context(torch.inference_mode())
                yield
        except UserError:
            raise
        except Exception as error:
            if error is self.hook_error:
                raise
            raise make_run_error(self.model, self.name, error) from error
        finally:
            ACTIVE_RECORDERS.pop()

    def is_active(self) -> bool:
        return bool(ACTIVE_RECORDERS) and ACTIVE_RECORDERS[-1] is self

    def is_capturing(self) -> bool:
        return self.is_active() and self.extract is not None

    @record_hook_error
    def on_attention_input(self, module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        hidden_states = args[0] if args else kwargs.get('hidden_states')
        if self.is_capturing() and isinstance(hidden_states, torch.Tensor) and hidden_states.ndim == 3:
            self.layer_arrays['normed_PTD'] = hidden_states.float().numpy()

    @record_hook_error
    def on_module_output(self, module: torch.nn.Module, args: tuple, output: Any) -> None:
        """Keep the attention weights that a module returns beside its output."""
        if not self.is_capturing():
            return
        values = [*iterate_values(output)]
        if self.is_trial:
            positions = [position for position, value in enumerate(values) if is_attention_weights(value)]
            if positions:
                self.weight_positions.setdefault(module, positions[0])
        elif 'attention_PHTS' not in self.layer_arrays:  # modules are nested, and the innermost returns first
            self.layer_arrays['attention_PHTS'] = values[self.weight_positions[module]].float().numpy()

    @record_hook_error
    def on_attention(self, module, query, key, value, scaling, output, attention) -> None:
        """Store the arrays of one attention call.

        Queries, keys and values are (P, H, T, K), outputs are (P, T, H, K). The keys and values of a group of heads
        are repeated for each head.
        """
        if self.extract is None:
            return
        if self.attending_module not in (None, module):  # a layer with two attentions, one after another
            normed = {name: self.layer_arrays[name] for name in ('normed_PTD',) if name in self.layer_arrays}
            self.append_layer({name: array for name, array in self.layer_arrays.items() if name not in normed})
            self.layer_arrays = normed
        self.attending_module = module
        width = query.shape[-1]
        if scaling is not None and scaling * width**0.5 != 1:  # scores are <q, k> / sqrt(K) here
            query = query.float() * (scaling * width**0.5)
        key, value = (repeat_heads(array, query.shape[1]) for array in (key, value))
        arrays = dict(query_PTHK=query, key_PSHK=key, value_PSHK=value)
        self.layer_arrays |= {name: array.transpose(1, 2).float().numpy() for name, array in arrays.items()}
        self.layer_arrays |= dict(attention_PHTS=attention.float().numpy(), head_PTHK=output.float().numpy())

    @record_hook_error
    def on_layer_output(self, module: torch.nn.Module, args: tuple, output: Any) -> Any:
        if not self.is_active():  # this forward pass is not one of this recorder
            return None
        residual, edited_output = next(iterate_values(output), None), None
        # Gemma 3n has several residual streams, and CPM-Ant puts tokens of its own before a text.
        if isinstance(residual, torch.Tensor) and residual.ndim == 3 and residual.shape[1] == self.length:
            residual_PT1D = residual[:, :, None]
            if (edited := self.edit('residual', residual_PT1D)) is not residual_PT1D:
                residual = edited[:, :, 0]
                edited_output = replace_first_value(output, residual)
            self.layer_arrays['residual_PTD'] = residual.float().numpy()
        self.append_layer(self.layer_arrays)
        self.layer_arrays, self.attending_module, self.layer_number = {}, None, self.layer_number + 1
        return edited_output  # None: torch keeps the output

    @record_hook_error
    def edit(self, target: str, array_PSHX: torch.Tensor, is_visible_PSHX: Any = True) -> torch.Tensor:
        """Apply the edits of this pass to an array of the running layer; return the array itself if none applies."""
        layer = self.layer_number - 1
        edits = [edit for edit in self.edits if edit.applies_to(target, layer)]
        if not edits:
            return array_PSHX
        for edit in edits:
            check_sizes(edit, *array_PSHX.shape[2:])
        arrays = [edit.make_arrays() for edit in edits]
        array = array_PSHX.float().numpy()  # NumPy has no bfloat16
        edited = apply_edits(arrays, layer, target, array, 0, is_visible_PSHX)
        return torch.from_numpy(edited).to(array_PSHX.dtype)

    def attend(
        self, eager: Callable, module, query, key, value, attention_mask=None, **options: Any
    ) -> tuple[Any, Any]:
        """Compute eager attention with the edits of this pass, check it, and store its arrays.

        Queries, keys and values are (P, H, T, K), outputs are (P, T, H, K). Where keys or values are edited, each
        query head has its own, so that single heads of a group can be edited.

        Raises:
            AttentionMismatchError: The weights do not give the outputs.
        """
        if not self.is_active():  # this forward pass is not one of this recorder
            return eager(module, query, key, value, attention_mask, **options)
        heads, group = query.shape[1], {}
        if self.edits:
            original = [repeat_heads(array, heads).transpose(1, 2) for array in (key, value)]
            edited = [self.edit(*pair) for pair in zip(('key', 'value'), original, strict=True)]
            if any(new is not old for new, old in zip(edited, original, strict=True)):
                key, value = (array.transpose(1, 2).contiguous() for array in edited)
                group = {'num_key_value_groups': 1} if hasattr(module, 'num_key_value_groups') else {}
        with replaced_attributes(module, group):
            output, attention = eager(module, query, key, value, attention_mask, **options)
        self.check_outputs(attention, value, output)
        if self.edits:
            weight_PSHT = attention.permute(0, 3, 1, 2)
            visible_PHTS = find_visible_keys(attention_mask, *attention.shape[2:])
            edited_PSHT = self.edit('attention', weight_PSHT, visible_PHTS.permute(0, 3, 1, 2).numpy())
            if edited_PSHT is not weight_PSHT:
                attention = edited_PSHT.permute(0, 2, 3, 1).contiguous()
                output = sum_values(attention, repeat_heads(value, heads))
        self.on_attention(module, query, key, value, options.get('scaling'), output, attention)
        return output, attention

    def check_outputs(
        self, attention_PHTS: torch.Tensor, value_PHSK: torch.Tensor, output_PTHK: torch.Tensor
    ) -> None:
        """Compare the outputs of some queries, the last among them, with the sums of values.

        Raises:
            AttentionMismatchError: They differ.
        """
        queries = slice((attention_PHTS.shape[2] - 1) % CHECKED_QUERY_STEP, None, CHECKED_QUERY_STEP)
        value_PHSK = repeat_heads(value_PHSK, attention_PHTS.shape[1])
        output_PTHK = output_PTHK[:, queries]
        if not output_PTHK.isfinite().all():
            raise UserError(
                f'{self.name} computes outputs of attention that are not finite; give another model or dtype'
            )
        difference = (sum_values(attention_PHTS[:, :, queries], value_PHSK) - output_PTHK).abs().max()
        tolerance = max(1e-4, 4 * torch.finfo(output_PTHK.dtype).eps)
        if not difference <= tolerance * output_PTHK.abs().max():
            raise AttentionMismatchError(
                f'{self.name} (model type {self.model.config.model_type}) cannot be measured: the outputs of its '
                'attention are not the sums of values with the weights that transformers returns; give another model'
            )

    def append_layer(self, layer: LayerArrays) -> None:
        if self.extract is not None:
            self.outputs.append(self.extract(layer))
            self.layer_numbers.append(self.layer_number)


def add_model_attentions(layers: list[LayerArrays], output: Any) -> Iterator[LayerArrays]:
    """Yield the layers with the attention weights that the model returns.

    If the model returns another number of weights than it has layers, the layers stay as they are.
    """
    attentions = getattr(output, 'attentions', None) or ()
    for index, layer in enumerate(layers):
        attention = attentions[index] if len(attentions) == len(layers) else None
        yield layer if attention is None else layer | dict(attention_PHTS=attention.float().numpy())


def iterate_values(output: Any) -> Iterator[Any]:
    """Yield what a module returns: a tensor, a tuple or list, or the values of a mapping."""
    if isinstance(output, dict):
        yield from output.values()
    elif isinstance(output, tuple | list):
        yield from output
    else:
        yield output


def replace_first_value(output: Any, value: torch.Tensor) -> Any:
    """Return what a module returns, a tensor, a tuple or list, or a mapping, with another first value."""
    if isinstance(output, dict):
        return type(output)(output | {next(iter(output)): value})
    if hasattr(output, '_replace'):  # a named tuple
        return output._replace(**{output._fields[0]: value})
    return type(output)([value, *output[1:]]) if isinstance(output, tuple | list) else value


def repeat_heads(array_PGSK: torch.Tensor, heads: int) -> torch.Tensor:
    """Repeat the keys or values of each group of heads for each of its heads."""
    size = heads // array_PGSK.shape[1]
    return array_PGSK.repeat_interleave(size, 1) if size > 1 else array_PGSK


def find_visible_keys(mask_PHTS: torch.Tensor | None, queries: int, keys: int) -> torch.Tensor:
    """Return which keys each query sees, (P or 1, H or 1, T, S); without a mask, those that are not later tokens.

    A mask is boolean, or is added to the scores, possibly with a position bias.
    """
    if mask_PHTS is None:
        return torch.ones(1, 1, queries, keys, dtype=torch.bool).tril(keys - queries)
    mask_PHTS = mask_PHTS[..., :keys]
    return mask_PHTS if mask_PHTS.dtype == torch.bool else mask_PHTS > torch.finfo(mask_PHTS.dtype).min / 2


def sum_values(attention_PHTS: torch.Tensor, value_PHSK: torch.Tensor) -> torch.Tensor:
    """Return the outputs of heads, (P, T, H, K), by the operations of transformers' eager attention."""
    return torch.matmul(attention_PHTS, value_PHSK).transpose(1, 2).contiguous()


@contextlib.contextmanager
def replaced_attributes(module: torch.nn.Module, attributes: dict[str, Any]) -> Iterator[None]:
    """Set attributes of a module within this context."""
    previous = {name: getattr(module, name) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in previous.items():
            setattr(module, name, value)


def is_attention_weights(value: Any) -> bool:
    """Return whether a value is attention weights for TRIAL_IDS.

    These have the shape (1, H, 2, 2), and rows that sum to at most 1. Keys, values and states of linear attention
    also have four axes. They do not pass this test.
    """
    if not isinstance(value, torch.Tensor) or value.ndim != 4 or value.shape[0] != 1 or value.shape[2:] != (2, 2):
        return False
    mass, tolerance = value.float().sum(-1), 2**-8 if value.dtype == torch.bfloat16 else 1e-4
    return bool((value >= 0).all() and (mass > 0).all() and (mass < 1 + tolerance).all())


def make_run_error(model: torch.nn.Module, name: str, error: Exception) -> UserError:
    """Make the UserError for an exception that transformers raises while a model runs."""
    return UserError(
        f'{name} (model type {model.config.model_type}) cannot be run by transformers {transformers.__version__}: '
        f'{format_error(error, with_type=True)}; '
        f'give {"another model" if model.dtype == torch.float32 else "--dtype=float32"}'
    )


def find_layers(model: torch.nn.Module) -> torch.nn.ModuleList:
    """Return the first module list that runs on texts and has as many modules as the config has layers.

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
            return matching[0] if len(matching) == 1 else find_used_list(model, matching)
    raise UserError(
        f'{type(model).__name__} (model type {config.model_type}) has no list of {counts[0] if counts else "its"} '
        'layers; give another model'
    )


def find_used_list(model: torch.nn.Module, module_lists: list[torch.nn.ModuleList]) -> torch.nn.ModuleList:
    """Return the first list whose modules run on a text. The layers of a vision tower do not."""
    used: list[torch.nn.ModuleList] = []
    hooks = [
        module_list[0].register_forward_hook(lambda *_, module_list=module_list: used.append(module_list))
        for module_list in module_lists
    ]
    try:
        # The first pass of AttentionRecorder raises the same exception, and reports it.
        with torch.inference_mode(), contextlib.suppress(Exception):
            model.base_model(input_ids=torch.as_tensor(TRIAL_IDS), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return (used or module_lists)[0]


def list_layer_configs(config: Any) -> list[Any]:
    """Return the config of each layer, or one config if it is that of all layers."""
    return [*config.per_layer_config] if getattr(config, 'is_heterogeneous', False) else [config]


DEFAULT_DTYPE = 'float32'
NUM_FIRST_KEYS = 10  # number of first tokens whose importance is reported, as in the paper
MAX_BATCH_BYTES = 1 << 26  # bytes of the attention weights of one layer in a batch


class HFModel:
    """A causal language model of transformers.

    `bos` is `auto` (what the tokenizer adds by itself), `none`, or `force` (BOS before every text). `dtype` is the
    type of weights and activations. Captured arrays are float32.
    """

    def __init__(
        self,
        model_dir: str | Path,
        bos: BosMode = 'auto',
        remote_code: bool = False,
        name: str = '',
        dtype: str = DEFAULT_DTYPE,
    ):
        self.model_dir, self.name, self.bos, self.dtype = Path(model_dir), name or f'hf:{model_dir}', bos, dtype
        check_has_attention(self.model_dir, self.name, remote_code)
        num_parameters, torch_dtype = files.count_parameters(self.model_dir), getattr(torch, dtype)
        files.check_memory(torch_dtype.itemsize * num_parameters, num_parameters, self.name, dtype)
        self.model = load_model(self.model_dir, self.name, remote_code, torch_dtype)
        self.config = self.model.config.get_text_config()
        self.remote_code = remote_code
        self.vocabulary = self.config.vocab_size
        self.has_sinks = any(hasattr(module, 'sinks') for module in self.model.modules())
        self.recorder = AttentionRecorder(self.model, self.name)
        layer_arrays = self.recorder.find_capture_mode()
        names = sorted({name for layer in layer_arrays for name in layer})
        self.available_arrays = tuple(map(add_layer_axis, names))
        numbered_layers = [*zip(self.recorder.layer_numbers, layer_arrays, strict=True)]
        self.array_layers = {
            add_layer_axis(name): tuple(number for number, layer in numbered_layers if name in layer)
            for name in names
        }
        self.heads_per_layer = tuple(
            layer['attention_PHTS'].shape[1] for layer in layer_arrays if 'attention_PHTS' in layer
        )
        self.edits: tuple[Edit, ...] = ()

    @property
    def editable_layers(self) -> dict[str, tuple[int, ...]]:
        """For each target of an edit, the layers, from 0, in which it can be edited."""
        names = dict.fromkeys(TARGETS, 'query_LPTHK' if self.recorder.mode == 'interface' else '')
        names |= dict(residual='residual_LPTD')
        return {
            target: tuple(number - 1 for number in self.array_layers.get(name, ())) for target, name in names.items()
        }

    def copy_with_edits(self, edits: tuple[Edit, ...]) -> 'HFModel':
        clone = copy.copy(self)
        clone.edits = edits
        return clone

    @property
    def digest(self) -> str:
        return add_edits_to_digest(self.unedited_digest, self.edits)

    @functools.cached_property
    def unedited_digest(self) -> str:
        digest = f'{files.digest_model_dir(self.model_dir)} {self.bos}'
        return digest if self.dtype == DEFAULT_DTYPE else f'{digest} {self.dtype}'

    @functools.cached_property
    def tokenizer(self) -> Any:
        try:
            with files.explain_remote_code(self.name):
                tokenizer = transformers.AutoTokenizer.from_pretrained(
                    self.model_dir, trust_remote_code=self.remote_code
                )
        except UserError:
            raise
        except Exception as error:  # transformers raises exceptions of many types here
            message = format_error(error)
            raise UserError(f'{self.name} has no tokenizer ({message}); give --inputs=random or repeated') from error
        if len(tokenizer) <= len(
            tokenizer.all_special_ids
        ):  # transformers makes an empty tokenizer if there are no files
            raise UserError(f'{self.name} has no tokenizer, or an empty one; give --inputs=random or repeated')
        return tokenizer

    @property
    def layers_without_attention(self) -> list[int]:
        """The layers, from 1, without an attention matrix.

        These are state-space, convolution and linear attention layers.
        """
        with_attention = self.array_layers['attention_LPHTS']
        return [number for number in range(1, len(self.recorder.layers) + 1) if number not in with_attention]

    @property
    def remarks(self) -> tuple[str, ...]:
        """Sentences that say where weights come from, and what is not measured, and why."""
        remarks = gguf.read_remarks(self.model_dir)
        if lacking := self.layers_without_attention:
            layer_types = (
                getattr(self.config, 'layer_types', None) or getattr(self.config, 'layers_block_type', None) or []
            )
            layer_types = dict.fromkeys(layer_types[number - 1] for number in lacking if number <= len(layer_types))
            layers_text, num_layers = ', '.join(map(str, lacking)), len(self.recorder.layers)
            layers_text += f': {", ".join(layer_types)}' if layer_types else ''
            remarks.append(
                f'{len(lacking)} of {num_layers} layers have no attention matrix ({layers_text}); '
                f'numbers of heads cover only the other {num_layers - len(lacking)}'
            )
        if len(set(self.heads_per_layer)) > 1:
            remarks.append(
                f'layers have {min(self.heads_per_layer)} to {max(self.heads_per_layer)} heads; each head counts once'
            )
        if 'query_LPTHK' not in self.available_arrays:
            remarks.append('it gives no queries, keys and values; their numbers are omitted')
        if self.recorder.mode != 'interface':
            remarks.append('its attention weights are those that transformers returns; its outputs are not checked')
        if 'residual_LPTD' not in self.available_arrays:
            remarks.append('its layers do not return one hidden state per token; their numbers are omitted')
        return tuple(remarks)

    @property
    def position(self) -> str:
        """The kind of position encoding, guessed from modules and config.

        transformers has no common field for it.
        """
        if getattr(self.config, 'alibi', False) or self.config.model_type in ('bloom', 'mpt'):
            return 'alibi'
        rotary = any('rotary' in type(module).__name__.lower() for module in self.model.modules())
        return 'rotary' if rotary else 'learned'

    @functools.cached_property
    def prefix_ids(self) -> list[int]:
        """The token ids before every text: those that the tokenizer puts there, or BOS.

        What the tokenizer puts after a text, such as EOS, is left out: a text is cut anywhere.
        """
        if self.bos == 'none':
            return []
        if self.bos == 'force':
            if self.tokenizer.bos_token_id is None:
                raise UserError(f'{self.name} has no BOS; remove --bos=force')
            return [self.tokenizer.bos_token_id]
        for text in ('a', 'A', '0', '.', ' '):  # a tokenizer may ignore some of them
            ids, text_ids = self.tokenizer(text)['input_ids'], self.encode_text(text)
            starts = (start for start in range(len(ids)) if ids[start : start + len(text_ids)] == text_ids)
            if text_ids and (start := next(starts, None)) is not None:
                return ids[:start]
        raise UserError(
            f'{self.name} has a tokenizer that hides what it puts before a text; give --bos=none or force'
        )

    def encode_text(self, text: str) -> list[int]:
        # verbose=False: no warning that the text is longer than the model reads, since it is cut later
        return self.tokenizer(text, add_special_tokens=False, verbose=False)['input_ids']

    def encode(self, text: str) -> list[int]:
        prefix_ids, ids = self.prefix_ids, self.encode_text(text)
        ids = ids if prefix_ids and ids[: len(prefix_ids)] == prefix_ids else [*prefix_ids, *ids]
        if unknown_ids := [token_id for token_id in ids if token_id >= self.vocabulary]:
            raise UserError(
                f'the tokenizer of {self.name} gives the id {unknown_ids[0]}, but the model has ids below '
                f'{self.vocabulary}: it belongs to another model'
            )
        return ids

    def encode_windows(self, text: str, length: int) -> list[list[int]]:
        ids = self.encode(text)
        size = max(1, length - len(self.prefix_ids))
        return [[*self.prefix_ids, *ids[end - size : end]][:length] for end in range(length, len(ids) + 1, size)]

    def decode_tokens(self, ids_T: np.ndarray) -> list[str]:
        return [self.tokenizer.decode([int(token_id)]) for token_id in ids_T]

    @property
    def max_length(self) -> int | None:
        limit = getattr(self.config, 'max_position_embeddings', None)
        return limit if limit and limit > 0 else None  # -1 in XLNet means that there is no limit

    def get_learned_key_names(self) -> list[str]:
        return ['(sink)'] * self.has_sinks

    def apply_training_format(self, ids_PT: np.ndarray) -> np.ndarray:
        return ids_PT

    def make_setting(self, length: int, **overrides: Any) -> MetricSetting:
        windows = self.find_windows(length)
        window = windows.pop() if len(windows) == 1 else None  # None if layers have different windows
        fields = dict(
            length=length,
            columns=int(self.has_sinks),
            implicit=self.has_sinks,
            gain=1.0,
            keys=min(NUM_FIRST_KEYS, length),
            prefix=0,
        )
        return MetricSetting(**fields | dict(window=window, reach=window or length, triggers=False) | overrides)

    def is_causal_softmax(self, length: int) -> bool:
        has_convolutions = any(
            isinstance(module, torch.nn.Conv1d) for layer in self.recorder.layers for module in layer.modules()
        )
        has_attention_alone = not self.layers_without_attention and not has_convolutions
        return self.find_windows(length) == {None} and not self.has_sinks and has_attention_alone

    def find_windows(self, length: int) -> set[int | None]:
        """Return the attention windows of the layers; None stands for layers whose window covers the length."""
        layer_configs = list_layer_configs(self.config)
        layer_types = getattr(self.config, 'layer_types', None) or ['sliding_attention'] * len(layer_configs)
        windows = [
            getattr(layer_config, 'sliding_window', None) if layer_type == 'sliding_attention' else None
            for layer_type, layer_config in zip(layer_types, itertools.cycle(layer_configs), strict=False)
        ]
        return {window if window and window < length else None for window in windows}

    def capture(
        self,
        ids_PT: np.ndarray,
        extract: ExtractFn,
        position_T: np.ndarray | None = None,
        on_progress: ProgressFn = ignore_progress,
    ) -> dict[str, np.ndarray]:
        length = check_length(self, ids_PT)
        self.check_positions(position_T)
        batch_size = max(1, MAX_BATCH_BYTES // (4 * max(self.heads_per_layer) * length**2))
        setting = self.make_setting(length)

        def extract_completed(layer: LayerArrays) -> dict[str, np.ndarray]:
            with find_thread_pools().limit(limits=1, user_api='blas'):
                return extract(
                    complete_arrays({add_layer_axis(name): array[None] for name, array in layer.items()}, setting)
                )

        def compute(ids_PT: np.ndarray) -> dict[str, np.ndarray]:
            position_kwargs = make_position_kwargs(ids_PT, position_T)
            return stack_layers(self.recorder(ids_PT, extract_completed, self.edits, **position_kwargs))

        return run_in_batches(compute, ids_PT, batch_size, on_progress)

    def check_positions(self, position_T: np.ndarray | None) -> None:
        """Raise UserError if positions are given and the model ignores `position_ids`."""
        if position_T is not None and self.ignores_positions:
            raise UserError(
                f'{self.name} (model type {self.config.model_type}) takes no positions of tokens (position_ids); '
                'remove --positions'
            )

    @functools.cached_property
    def ignores_positions(self) -> bool:
        ids_PT = np.arange(3)[None] % self.vocabulary
        with self.recorder.activate(ids_PT.shape[1], None):
            logits, other_logits = (
                self.model(torch.as_tensor(ids_PT), use_cache=False, **make_position_kwargs(ids_PT, positions)).logits
                for positions in (np.array([0, 1, 2]), np.array([2, 1, 0]))
            )
        return torch.equal(logits, other_logits)

    def compute_token_losses(self, ids_PT: np.ndarray, position_T: np.ndarray | None = None) -> np.ndarray:
        length = check_length(self, ids_PT)
        self.check_positions(position_T)

        def compute(ids_PT: np.ndarray) -> dict[str, np.ndarray]:
            position_kwargs = make_position_kwargs(ids_PT, position_T)
            ids = torch.as_tensor(ids_PT, dtype=torch.long)
            with self.recorder.activate(length, None, self.edits):
                logits_PTV = self.model(input_ids=ids, use_cache=False, **position_kwargs).logits[:, :-1].float()
                # Over (P, V, T), cross_entropy has ten times the rounding errors: its sums are not contiguous.
                loss_PT = -logits_PTV.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
            return {'loss_LPT': loss_PT.numpy()[None]}

        return run_in_batches(compute, ids_PT, max(1, MAX_BATCH_BYTES // (4 * length * self.vocabulary)))['loss_LPT'][
            0
        ]


def make_position_kwargs(ids_PT: np.ndarray, position_T: np.ndarray | None) -> dict[str, torch.Tensor]:
    """Return the keyword arguments of a forward pass for token positions; None: the model's own.

    The attention mask says that each row is one text. Without it transformers takes decreasing positions for the
    start of another text.
    """
    if position_T is None:
        return {}
    position_PT = np.broadcast_to(position_T, ids_PT.shape).copy()
    return dict(position_ids=torch.as_tensor(position_PT), attention_mask=torch.ones(ids_PT.shape))


@functools.cache
def find_thread_pools() -> threadpoolctl.ThreadpoolController:
    """Find the thread pools of BLAS libraries.

    The products of metrics are small. NumPy computes them with one thread, because its threads wait for each other
    longer than they compute when the threads of PyTorch or of another program use the same cores.
    """
    return threadpoolctl.ThreadpoolController()


def check_has_attention(model_dir: Any, name: str, remote_code: bool) -> None:
    """Refuse a model without attention heads (Mamba, RWKV, xLSTM, ...) before its weights are read.

    Raises:
        UserError: The config of the model has no attention heads, or cannot be loaded.
    """
    with suppress_transformers_logs(transformers):
        try:
            config = transformers.AutoConfig.from_pretrained(
                model_dir, trust_remote_code=remote_code
            ).get_text_config()
        except Exception as error:
            raise make_load_error(name, error) from error
    if all(getattr(layer_config, 'num_attention_heads', None) is None for layer_config in list_layer_configs(config)):
        raise UserError(
            f'{name} is of model type {config.model_type}, whose config has no attention heads '
            '(num_attention_heads): there is no attention to measure; give a model with attention'
        )


def load_model(model_dir: Any, name: str, remote_code: bool, dtype: torch.dtype) -> torch.nn.Module:
    """Load a model with eager attention; refuse it if a parameter is missing in its files."""
    options = dict(dtype=dtype, attn_implementation='eager', use_safetensors=True, trust_remote_code=remote_code)
    with suppress_transformers_logs(transformers):
        try:
            model, loading_info = transformers.AutoModelForCausalLM.from_pretrained(
                model_dir, output_loading_info=True, **options
            )
        except Exception as error:  # errors of the config, of weights, or of missing packages
            raise make_load_error(name, error) from error
    if missing := sorted(map(str, [*loading_info['missing_keys'], *loading_info['mismatched_keys']])):
        raise UserError(f'{name} is incomplete: {len(missing)} of its arrays are missing ({missing[0]}, ...)')
    return model.eval()


def make_load_error(name: str, error: Exception) -> UserError:
    return UserError(
        f'{name} cannot be loaded by transformers {transformers.__version__}: {format_error(error, with_type=True)}'
    )


def add_layer_axis(name: str) -> str:
    """Return the name of an array with the axis L, such as residual_LPTD for residual_PTD."""
    return name.replace('_P', '_LP')


def stack_layers(layers: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Concatenate the arrays of all layers by name; a layer without attention has no attention arrays."""
    names = dict.fromkeys(name for layer in layers for name in layer)
    return {name: concatenate_layers(name, [layer[name] for layer in layers if name in layer]) for name in names}


def concatenate_layers(name: str, arrays: list[np.ndarray]) -> np.ndarray:
    """Concatenate the arrays of layers, each (1, ...), along L; the letters of a name are its axes.

    Heads of different widths K are padded with zeros to the widest, which changes no norm, product or variance. If
    layers differ in their number of heads, arrays are concatenated along H, as heads of one layer, so that every head
    has the same weight in each mean.
    """
    axes = name.rpartition('_')[2]
    if axes.endswith('K'):
        widest = max(array.shape[-1] for array in arrays)
        arrays = [
            np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, widest - array.shape[-1])])
            if array.shape[-1] < widest
            else array
            for array in arrays
        ]
    axis = 'H' if 'H' in axes and len({array.shape[axes.index('H')] for array in arrays}) > 1 else 'L'
    return np.concatenate(arrays, axes.index(axis) if axis in axes else 0)
