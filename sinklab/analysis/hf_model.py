"""A Hugging Face model as a measurable model."""

import contextlib
import copy
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import threadpoolctl
import torch
import transformers

from sinklab.analysis.bos import BosMode
from sinklab.analysis.edits import Edit, EditableArray, apply_edits
from sinklab.analysis.model_protocol import (
    ExtractFn,
    MeasurableModel,
    ProgressFn,
    ignore_progress,
    run_in_batches,
)
from sinklab.errors import UserError, format_error
from sinklab.hf import files, gguf
from sinklab.metrics.metric import Arrays, MetricContext, complete_arrays

# The token ids of the trial pass: two tokens are enough to recognize causal attention.
TRIAL_IDS = np.zeros((1, 2), np.int64)
EAGER = 'eager_attention_forward'  # the function of a modeling file that computes attention
# Names of the module of a layer whose output is added to the hidden states as that of the FFN; the first one that
# exists is taken, since transformers has no common name.
FFN_MODULE_NAMES = (
    'post_feedforward_layernorm',
    'post_mlp_layernorm',
    'mlp',
    'feed_forward',
    'block_sparse_moe',
    'ffn',
)

# Arrays of one layer, under the names of sinklab.metrics.metric without the letter L.
LayerArrays = dict[str, np.ndarray]


class AttentionRecorder:
    """A recorder that runs a model and passes the arrays of each layer to a function, layer by layer.

    It captures attention from the function EAGER of the model's own code, which models of transformers' attention
    interface have. An implementation with a name of its own would not do: sparse attention (DeepSeek) is dense under
    a name that it does not know.
    """

    def __init__(self, model: torch.nn.Module, name: str):
        self.model = model
        self.name = name
        self.layers = find_layers(model)
        code_names = dict.fromkeys(type(module).__module__ for module in model.modules())
        self.code_modules = [sys.modules[name] for name in code_names if hasattr(sys.modules[name], EAGER)]
        # The state of a forward pass.
        self.extract: Callable[[LayerArrays], Any] = dict
        self.edits: tuple[Edit, ...] = ()
        self.layer = 0  # the layer that is running
        self.layer_arrays: LayerArrays = {}
        self.outputs: list[Any] = []

    def run_trial(self) -> list[LayerArrays]:
        """Return the arrays of each layer for two tokens.

        Raises:
            UserError: The model cannot be run, or its attention cannot be measured.
        """
        with files.call_transformers(f'{self.name} (model type {self.model.config.model_type})'):
            layers = self(TRIAL_IDS, dict)
        attentions = [layer['attention_PHTS'] for layer in layers if 'attention_PHTS' in layer]
        if not attentions:
            raise UserError(
                f'{self.name} (model type {self.model.config.model_type}) has no attention that passes through the '
                'attention interface of transformers; give another model'
            )
        if any(attention[..., 0, 1].any() for attention in attentions):
            raise UserError(f'{self.name} attends to later tokens; give a causal model')
        if len({attention.shape[1] for attention in attentions}) > 1:
            raise UserError(f'{self.name} has layers with different numbers of heads; give another model')
        return layers

    def __call__(
        self,
        ids_PT: np.ndarray,
        extract: Callable[[LayerArrays], Any],
        edits: tuple[Edit, ...] = (),
        **model_kwargs: torch.Tensor,
    ) -> list[Any]:
        with self.activate(extract, edits):
            self.model.base_model(input_ids=torch.as_tensor(ids_PT), use_cache=False, **model_kwargs)
        return self.outputs

    @contextlib.contextmanager
    def activate(self, extract: Callable[[LayerArrays], Any], edits: tuple[Edit, ...] = ()) -> Iterator[None]:
        """Capture and edit the forward pass within this context."""
        self.extract = extract
        self.edits = edits
        self.layer = 0
        self.layer_arrays = {}
        self.outputs = []
        with contextlib.ExitStack() as stack:
            for code in self.code_modules:
                attend = functools.partial(self.attend, getattr(code, EAGER))
                stack.enter_context(replaced_attributes(code, {EAGER: attend}))
            for layer in self.layers:
                stack.enter_context(layer.register_forward_hook(self.on_layer_output))
                ffn = next((getattr(layer, name) for name in FFN_MODULE_NAMES if hasattr(layer, name)), None)
                if ffn is not None and not hasattr(layer, 'shared_mlp'):  # Granite adds the outputs of two modules
                    stack.enter_context(ffn.register_forward_hook(lambda *args: self.edit_output('ffn', args[-1])))
            stack.enter_context(torch.inference_mode())
            yield

    def on_layer_output(self, module: torch.nn.Module, args: tuple, output: Any) -> Any:
        """Edit and store the hidden states that a layer returns, and extract what is kept of the layer."""
        output = self.edit_output('residual', output)
        self.outputs.append(self.extract(self.layer_arrays))
        self.layer_arrays = {}
        self.layer += 1
        return output

    def edit_output(self, target: str, output: Any) -> Any:
        """Edit and store the vectors that a module returns, alone or as the first value of a tuple."""
        array = output[0] if isinstance(output, tuple) else output
        if array.ndim == 3:  # Gemma 3n has several residual streams
            array = self.edit(target, array[:, :, None])[:, :, 0]
            self.layer_arrays[f'{target}_PTD'] = array.float().numpy()
        return (array, *output[1:]) if isinstance(output, tuple) else array

    def edit(self, target: str, array_PSHX: torch.Tensor, is_visible_PSHX: Any = True) -> torch.Tensor:
        """Apply the edits of this pass to an array of the running layer."""
        edits = [edit for edit in self.edits if edit.applies_to(target, self.layer)]
        if not edits:
            return array_PSHX
        arrays = [edit.make_arrays() for edit in edits]
        array = array_PSHX.float().numpy()  # NumPy has no bfloat16
        edited = apply_edits(arrays, self.layer, target, array, 0, is_visible_PSHX)
        return torch.from_numpy(edited).to(array_PSHX.dtype)

    def attend(
        self, eager: Callable, module, query, key, value, attention_mask=None, **options: Any
    ) -> tuple[Any, Any]:
        """Compute eager attention with the edits of this pass, check it, and store its arrays.

        Queries, keys and values are (P, H, T, K), outputs are (P, T, H, K). Where keys or values are edited, each
        query head has its own, so that single heads of a group can be edited.

        Raises:
            UserError: The weights do not give the outputs, or the layer has another attention.
        """
        heads = query.shape[1]
        scaling = options.get('scaling')
        scale = 1 if scaling is None else scaling * query.shape[-1] ** 0.5  # captured scores are <q, k> / sqrt(K)
        if any(edit.applies_to('query', self.layer) for edit in self.edits):
            scaled = query * scale
            edited = self.edit('query', scaled.transpose(1, 2)).transpose(1, 2)
            query = torch.where(edited == scaled, query, edited / scale)  # so that others are not rounded
        group = {}
        if any(edit.target in ('key', 'value') and edit.applies_to(edit.target, self.layer) for edit in self.edits):
            key, value = (repeat_heads(array, heads).transpose(1, 2) for array in (key, value))
            key, value = self.edit('key', key), self.edit('value', value)
            key, value = (array.transpose(1, 2).contiguous() for array in (key, value))
            group = {'num_key_value_groups': 1} if hasattr(module, 'num_key_value_groups') else {}
        with replaced_attributes(module, group):
            output, attention = eager(module, query, key, value, attention_mask, **options)
        self.check_outputs(attention, value, output)
        if any(edit.applies_to('attention', self.layer) for edit in self.edits):
            visible_PHTS = find_visible_keys(attention_mask, *attention.shape[2:])
            is_visible_PSHT = visible_PHTS.permute(0, 3, 1, 2).numpy()
            edited_PSHT = self.edit('attention', attention.permute(0, 3, 1, 2), is_visible_PSHT)
            attention = edited_PSHT.permute(0, 2, 3, 1).contiguous()
            output = sum_values(attention, repeat_heads(value, heads))
        output = self.edit('head', output)
        self.store_attention(query if scale == 1 else query.float() * scale, key, value, output, attention)
        return output, attention

    def store_attention(self, query, key, value, output, attention) -> None:
        """Store the arrays of one attention call; keys and values are repeated for each head of a group."""
        if 'attention_PHTS' in self.layer_arrays:
            raise UserError(f'{self.name} has several attention matrices in a layer; give another model')
        key, value = (repeat_heads(array, query.shape[1]) for array in (key, value))
        arrays = dict(query_PTHK=query, key_PSHK=key, value_PSHK=value)
        self.layer_arrays |= {name: array.transpose(1, 2).float().numpy() for name, array in arrays.items()}
        self.layer_arrays |= dict(attention_PHTS=attention.float().numpy(), head_PTHK=output.float().numpy())

    def check_outputs(
        self, attention_PHTS: torch.Tensor, value_PHSK: torch.Tensor, output_PTHK: torch.Tensor
    ) -> None:
        """Compare the outputs with the sums of values.

        Raises:
            UserError: They differ, or are not finite.
        """
        value_PHSK = repeat_heads(value_PHSK, attention_PHTS.shape[1])
        if not output_PTHK.isfinite().all():
            raise UserError(
                f'{self.name} computes outputs of attention that are not finite; give another model or dtype'
            )
        difference = (sum_values(attention_PHTS, value_PHSK) - output_PTHK).abs().max()
        tolerance = max(1e-4, 4 * torch.finfo(output_PTHK.dtype).eps)
        if not difference <= tolerance * output_PTHK.abs().max():
            raise UserError(
                f'{self.name} (model type {self.model.config.model_type}) cannot be measured: the outputs of its '
                'attention are not the sums of values with the weights that transformers returns; give another model'
            )


def repeat_heads(array_PGSK: torch.Tensor, heads: int) -> torch.Tensor:
    """Repeat the keys or values of each group of heads for each of its heads."""
    return array_PGSK.repeat_interleave(heads // array_PGSK.shape[1], 1)


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


def find_layers(model: torch.nn.Module) -> torch.nn.ModuleList:
    """Return the list of the layers that read text: the first one whose length is that of the config."""
    num_layers = model.config.get_text_config().num_hidden_layers
    for module in model.get_decoder().modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == num_layers:
            return module
    raise UserError(
        f'{type(model).__name__} (model type {model.config.model_type}) has no list of {num_layers} layers; give '
        'another model'
    )


DEFAULT_DTYPE = 'float32'
NUM_FIRST_KEYS = 10  # number of first tokens whose importance is reported, as in the paper
MAX_BATCH_BYTES = 1 << 26  # bytes of the attention weights of one layer in a batch


class HFModel(MeasurableModel):
    """A causal language model of transformers.

    `bos` is `auto` (what the tokenizer adds by itself), `none`, or `force` (BOS before every text). `dtype` is the
    type of weights and activations. Captured arrays are float32.
    """

    def __init__(self, model_dir: str | Path, bos: BosMode = 'auto', name: str = '', dtype: str = DEFAULT_DTYPE):
        self.model_dir = Path(model_dir)
        self.name = name or f'hf:{model_dir}'
        self.bos = bos
        self.dtype = dtype
        num_parameters = files.count_parameters(self.model_dir)
        torch_dtype = getattr(torch, dtype)
        files.check_memory(torch_dtype.itemsize * num_parameters, num_parameters, self.name, dtype)
        self.model = files.load_model(self.model_dir, self.name, dtype=torch_dtype)
        self.config = self.model.config.get_text_config()
        self.vocabulary = self.config.vocab_size
        limit = getattr(self.config, 'max_position_embeddings', None)
        self.max_length = limit if limit and limit > 0 else None  # -1 in XLNet means that there is no limit
        # The kind of position encoding is guessed from modules: transformers has no common field for it.
        is_rotary = any('rotary' in type(module).__name__.lower() for module in self.model.modules())
        self.position = 'rotary' if is_rotary else 'learned'
        self.has_sinks = any(hasattr(module, 'sinks') for module in self.model.modules())
        self.learned_key_names = ['(sink)'] * self.has_sinks
        self.recorder = AttentionRecorder(self.model, self.name)
        layer_arrays = self.recorder.run_trial()
        names = sorted({name for layer in layer_arrays for name in layer})
        self.available_arrays = tuple(map(add_layer_axis, names))
        self.array_layers = {
            add_layer_axis(name): tuple(number for number, layer in enumerate(layer_arrays) if name in layer)
            for name in names
        }
        self.num_heads = next(layer['attention_PHTS'].shape[1] for layer in layer_arrays if 'attention_PHTS' in layer)
        self.editable_arrays = find_editable_arrays(layer_arrays, self.num_heads)
        self.edits: tuple[Edit, ...] = ()
        self.remarks = gguf.read_remarks(self.model_dir)
        layers = range(len(layer_arrays))
        # State-space, convolution and linear attention layers have no attention matrix.
        if lacking := sorted({*layers} - {*self.array_layers['attention_LPHTS']}):
            self.remarks.append(
                f'{len(lacking)} of {len(layers)} layers have no attention matrix (from 0: '
                f'{", ".join(map(str, lacking))}); numbers of heads cover only the other {len(layers) - len(lacking)}'
            )
        if 'residual_LPTD' not in self.available_arrays:
            self.remarks.append('its layers do not return one hidden state per token; their numbers are omitted')

    def copy_with_edits(self, edits: tuple[Edit, ...]) -> 'HFModel':
        clone = copy.copy(self)
        clone.edits = edits
        return clone

    @functools.cached_property
    def tokenizer(self) -> Any:
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(self.model_dir, trust_remote_code=False)
        except Exception as error:  # transformers raises exceptions of many types here
            message = f'{self.name} has no tokenizer ({format_error(error)}); give --inputs=random or repeated'
            raise UserError(message) from error
        # transformers makes an empty tokenizer if there are no files.
        if len(tokenizer) <= len(tokenizer.all_special_ids):
            raise UserError(f'{self.name} has no tokenizer, or an empty one; give --inputs=random or repeated')
        return tokenizer

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
            ids = self.tokenizer(text)['input_ids']
            text_ids = self.tokenizer(text, add_special_tokens=False)['input_ids']
            starts = (start for start in range(len(ids)) if ids[start : start + len(text_ids)] == text_ids)
            if text_ids and (start := next(starts, None)) is not None:
                return ids[:start]
        raise UserError(
            f'{self.name} has a tokenizer that hides what it puts before a text; give --bos=none or force'
        )

    def encode_text(self, text: str) -> list[int]:
        """Return the token ids of a text, without those before every text if it begins with them."""
        # verbose=False: no warning that the text is longer than the model reads, since it is cut later
        ids = self.tokenizer(text, add_special_tokens=False, verbose=False)['input_ids']
        if (largest_id := max([*self.prefix_ids, *ids], default=0)) >= self.vocabulary:
            raise UserError(
                f'the tokenizer of {self.name} gives the id {largest_id}, but the model has ids below '
                f'{self.vocabulary}: it belongs to another model'
            )
        return ids[len(self.prefix_ids) :] if ids[: len(self.prefix_ids)] == self.prefix_ids else ids

    def add_first_tokens(self, ids: list[int]) -> list[int]:
        return [*self.prefix_ids, *ids]

    def decode_tokens(self, ids_T: np.ndarray) -> list[str]:
        return [self.tokenizer.decode([int(token_id)]) for token_id in ids_T]

    def make_context(self, length: int, **overrides: Any) -> MetricContext:
        windows = self.find_windows(length)
        window = windows.pop() if len(windows) == 1 else None  # None if layers have different windows
        fields = dict(
            length=length,
            learned_keys=int(self.has_sinks),
            implicit=self.has_sinks,
            gain=1.0,
            keys=min(NUM_FIRST_KEYS, length),
            prefix=0,
        )
        return MetricContext(**fields | dict(window=window, reach=window or length, triggers=False) | overrides)

    def find_windows(self, length: int) -> set[int | None]:
        """Return the attention windows of the layers; None stands for layers whose window covers the length."""
        layer_types = getattr(self.config, 'layer_types', None) or ['sliding_attention']
        sliding_window = getattr(self.config, 'sliding_window', None)
        windows = [sliding_window if layer_type == 'sliding_attention' else None for layer_type in layer_types]
        return {window if window and window < length else None for window in windows}

    def capture(
        self,
        ids_PT: np.ndarray,
        extract: ExtractFn,
        position_T: np.ndarray | None = None,
        on_progress: ProgressFn = ignore_progress,
    ) -> dict[str, np.ndarray]:
        length = self.check_length(ids_PT)
        batch_size = max(1, MAX_BATCH_BYTES // (4 * self.num_heads * length**2))
        context = self.make_context(length)
        # NumPy computes the small products of metrics with one thread: its threads wait for those of PyTorch.
        thread_pools = threadpoolctl.ThreadpoolController()

        def extract_completed(layer: LayerArrays) -> Arrays:
            with thread_pools.limit(limits=1, user_api='blas'):
                return extract(
                    complete_arrays({add_layer_axis(name): array[None] for name, array in layer.items()}, context)
                )

        def compute(ids_PT: np.ndarray, edits: tuple[Edit, ...]) -> dict[str, np.ndarray]:
            position_kwargs = self.make_position_kwargs(ids_PT, position_T)
            return stack_layers(self.recorder(ids_PT, extract_completed, edits, **position_kwargs))

        return run_in_batches(compute, ids_PT, batch_size, on_progress, self.edits)

    def make_position_kwargs(self, ids_PT: np.ndarray, position_T: np.ndarray | None) -> dict[str, torch.Tensor]:
        """Return the keyword arguments of a forward pass for token positions; None: the model's own.

        The attention mask says that each row is one text. Without it transformers takes decreasing positions for the
        start of another text.
        """
        if position_T is None:
            return {}
        if 'position_ids' not in inspect.signature(self.model.forward).parameters:
            raise UserError(f'{self.name} takes no positions of tokens (position_ids); remove --positions')
        position_PT = np.broadcast_to(position_T, ids_PT.shape).copy()
        return dict(position_ids=torch.as_tensor(position_PT), attention_mask=torch.ones(ids_PT.shape))

    def compute_token_losses(self, ids_PT: np.ndarray, position_T: np.ndarray | None = None) -> np.ndarray:
        def compute_loss(logits_PTV: torch.Tensor, ids_PT: torch.Tensor) -> dict[str, np.ndarray]:
            # Over (P, V, T), cross_entropy has ten times the rounding errors: its sums are not contiguous.
            loss_PT = -logits_PTV[:, :-1].float().log_softmax(-1).gather(-1, ids_PT[:, 1:, None])[..., 0]
            return {'loss_LPT': loss_PT.numpy()[None]}

        return self.run_whole_model(compute_loss, ids_PT, position_T)['loss_LPT'][0]

    def compute_logits(self, ids_PT: np.ndarray) -> np.ndarray:
        arrays = self.run_whole_model(lambda logits, _: {'logits_LPTV': logits.float().numpy()[None]}, ids_PT)
        return arrays['logits_LPTV'][0]

    def run_whole_model(
        self,
        extract: Callable[[torch.Tensor, torch.Tensor], dict[str, np.ndarray]],
        ids_PT: np.ndarray,
        position_T: np.ndarray | None = None,
    ) -> dict[str, np.ndarray]:
        """Run the model with its head, and return what `extract` computes from logits_PTV and ids_PT."""
        length = self.check_length(ids_PT)

        def compute(ids_PT: np.ndarray, edits: tuple[Edit, ...]) -> dict[str, np.ndarray]:
            position_kwargs = self.make_position_kwargs(ids_PT, position_T)
            ids = torch.as_tensor(ids_PT, dtype=torch.long)
            with self.recorder.activate(lambda layer_arrays: None, edits):
                return extract(self.model(input_ids=ids, use_cache=False, **position_kwargs).logits, ids)

        batch_size = max(1, MAX_BATCH_BYTES // (4 * length * self.vocabulary))
        return run_in_batches(compute, ids_PT, batch_size, edits=self.edits)


def find_editable_arrays(layer_arrays: list[LayerArrays], num_heads: int) -> dict[str, EditableArray]:
    """Return where each target of edits can be edited, from the arrays of the trial pass."""
    names = 'attention_PHTS', 'query_PTHK', 'key_PSHK', 'value_PSHK', 'head_PTHK', 'ffn_PTD', 'residual_PTD'
    editable_arrays = {}
    for name in names:
        widths = {index: layer[name].shape[-1] for index, layer in enumerate(layer_arrays) if name in layer}
        if widths:
            heads = num_heads if 'H' in name else 1
            editable_arrays[name.partition('_')[0]] = EditableArray(tuple(widths), heads, max(widths.values()))
    return editable_arrays


def add_layer_axis(name: str) -> str:
    """Return the name of an array with the axis L, such as residual_LPTD for residual_PTD."""
    return name.replace('_P', '_LP')


def stack_layers(layers: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Concatenate the arrays of all layers by name; a layer without attention has no attention arrays."""
    names = dict.fromkeys(name for layer in layers for name in layer)
    return {name: concatenate_layers(name, [layer[name] for layer in layers if name in layer]) for name in names}


def concatenate_layers(name: str, arrays: list[np.ndarray]) -> np.ndarray:
    """Concatenate the arrays of layers, each (1, ...), along L; the letters of a name are its axes.

    Heads of different widths K are padded with zeros to the widest, which changes no norm, product or variance.
    """
    axes = name.rpartition('_')[2]
    if len({array.shape[-1] for array in arrays}) > 1 and axes.endswith('K'):
        width = max(array.shape[-1] for array in arrays)
        arrays = [np.pad(array, [*[(0, 0)] * (array.ndim - 1), (0, width - array.shape[-1])]) for array in arrays]
    return np.concatenate(arrays, axes.index('L') if 'L' in axes else 0)
