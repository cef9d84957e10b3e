"""A Hugging Face model as a measurable model."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from sinklab.analysis import hf_hub
from sinklab.analysis.hf_attention_hooks import (
    ATTENTION_NAME,
    AttentionRecorder,
    LayerArrays,
    format_exception,
    make_run_error,
)
from sinklab.analysis.model_protocol import (
    ExtractFn,
    ProgressFn,
    check_length,
    ignore_progress,
    run_in_batches,
)
from sinklab.hf.parity import suppress_transformers_logs
from sinklab.metrics.metric import MetricSetting, complete_arrays
from sinklab.schema import UserError

NUM_FIRST_KEYS = 10  # number of first tokens whose importance is reported, as in the paper
MAX_BATCH_BYTES = 1 << 26  # bytes of the attention weights of one layer in a batch


class HFModel:
    """A causal language model of transformers in float32.

    `bos` is `auto` (what the tokenizer adds by itself), `none`, or `force` (BOS before every text).
    """

    def __init__(self, model_dir: str | Path, bos: str = 'auto', remote_code: bool = False, name: str = ''):
        self.model_dir, self.name, self.bos = Path(model_dir), name or f'hf:{model_dir}', bos
        check_has_attention(self.model_dir, self.name, remote_code)
        self.model = load_model(self.model_dir, self.name, remote_code)
        self.config = self.model.config.get_text_config()
        self.remote_code = remote_code
        self.vocabulary = self.config.vocab_size
        self.has_sinks = any(hasattr(module, 'sinks') for module in self.model.modules())
        self.recorder = AttentionRecorder(self.model, self.name)
        layer_arrays = self.recorder.run_trial()
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

    @functools.cached_property
    def digest(self) -> str:
        return f'{hf_hub.digest_model_dir(self.model_dir)} {self.bos}'

    @functools.cached_property
    def tokenizer(self) -> Any:
        try:
            with hf_hub.explain_remote_code(self.name):
                tokenizer = transformers.AutoTokenizer.from_pretrained(
                    self.model_dir, trust_remote_code=self.remote_code
                )
        except UserError:
            raise
        except Exception as error:  # transformers raises exceptions of many types here
            message = ' '.join(str(error).split())[:200]
            raise UserError(f'{self.name} has no tokenizer ({message}); give --inputs=random or repeated') from error
        if len(tokenizer) <= len(
            tokenizer.all_special_ids
        ):  # transformers makes an empty tokenizer if there are no files
            raise UserError(f'{self.name} has no tokenizer, or one of no words; give --inputs=random or repeated')
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
        """Sentences that say what is not measured, and why."""
        remarks = []
        if lacking := self.layers_without_attention:
            layer_types = (
                getattr(self.config, 'layer_types', None) or getattr(self.config, 'layers_block_type', None) or []
            )
            layer_types = dict.fromkeys(layer_types[number - 1] for number in lacking if number <= len(layer_types))
            layers_text, num_layers = ', '.join(map(str, lacking)), len(self.recorder.layers)
            layers_text += f': {", ".join(layer_types)}' if layer_types else ''
            remarks.append(
                f'{len(lacking)} of {num_layers} layers have no attention matrix ({layers_text}); '
                f'numbers of heads are of the other {num_layers - len(lacking)}'
            )
        if len(set(self.heads_per_layer)) > 1:
            remarks.append(
                f'layers have {min(self.heads_per_layer)} to {max(self.heads_per_layer)} heads; '
                'each head of each counts once'
            )
        if 'query_LPTHK' not in self.available_arrays:
            remarks.append('it shows no queries, keys and values; numbers of these are left out')
        if 'residual_LPTD' not in self.available_arrays:
            remarks.append('its layers do not return one hidden state a token; numbers of hidden states are left out')
        return tuple(remarks)

    @property
    def position(self) -> str:
        """The kind of position encoding, guessed from modules and config.

        transformers has no common field for it.
        """
        rotary = any('rotary' in type(module).__name__.lower() for module in self.model.modules())
        alibi = getattr(self.config, 'alibi', False) or self.config.model_type in ('bloom', 'mpt')
        return 'rotary' if rotary else 'alibi' if alibi else 'learned'

    def encode(self, text: str) -> list[int]:
        ids = self.tokenizer(text, add_special_tokens=self.bos == 'auto')['input_ids']
        if unknown_ids := [token_id for token_id in ids if token_id >= self.vocabulary]:
            raise UserError(
                f'the tokenizer of {self.name} gives the id {unknown_ids[0]}, and the model has ids below '
                f'{self.vocabulary}: it is that of another model'
            )
        if self.bos != 'force':
            return ids
        bos_id = self.tokenizer.bos_token_id
        if bos_id is None:
            raise UserError(f'{self.name} has no BOS; leave --bos=force out')
        return ids if ids[:1] == [bos_id] else [bos_id, *ids]

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
        layer_types = getattr(self.config, 'layer_types', None) or ['sliding_attention']
        window = getattr(self.config, 'sliding_window', None)
        effective_window = window if window and window < length else None
        return {effective_window if layer_type == 'sliding_attention' else None for layer_type in layer_types}

    def capture(
        self,
        ids_PT: np.ndarray,
        extract: ExtractFn,
        position_T: np.ndarray | None = None,
        on_progress: ProgressFn = ignore_progress,
    ) -> dict[str, np.ndarray]:
        length = check_length(self, ids_PT)
        heads = self.config.num_attention_heads if len(set(self.heads_per_layer)) == 1 else max(self.heads_per_layer)
        batch_size = max(1, MAX_BATCH_BYTES // (4 * heads * length**2))
        setting = self.make_setting(length)

        def extract_completed(layer: LayerArrays) -> dict[str, np.ndarray]:
            return extract(
                complete_arrays({add_layer_axis(name): array[None] for name, array in layer.items()}, setting)
            )

        def compute(ids_PT: np.ndarray) -> dict[str, np.ndarray]:
            position_kwargs = {} if position_T is None else make_position_kwargs(ids_PT, position_T)
            return stack_layers(self.recorder(ids_PT, extract_completed, **position_kwargs))

        return run_in_batches(compute, ids_PT, batch_size, on_progress)

    def compute_loss(self, ids_PT: np.ndarray, position_T: np.ndarray | None = None) -> np.ndarray:
        length = check_length(self, ids_PT)

        def compute(ids_PT: np.ndarray) -> dict[str, np.ndarray]:
            position_kwargs = {} if position_T is None else make_position_kwargs(ids_PT, position_T)
            ids = torch.as_tensor(ids_PT, dtype=torch.long)
            with torch.inference_mode():
                try:
                    logits = self.model(input_ids=ids, use_cache=False, **position_kwargs).logits[:, :-1]
                except Exception as error:
                    raise make_run_error(self.model, self.name, error) from error
                loss_PT = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction='none')
            return {'loss_LPT': loss_PT.numpy()[None]}

        return run_in_batches(compute, ids_PT, max(1, MAX_BATCH_BYTES // (4 * length * self.vocabulary)))['loss_LPT'][
            0
        ]


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
    if getattr(config, 'num_attention_heads', None) is None:
        raise UserError(
            f'{name} is of model type {config.model_type}, whose config has no attention heads '
            '(num_attention_heads): there is no attention to measure; give a model with attention'
        )


def load_model(model_dir: Any, name: str, remote_code: bool) -> torch.nn.Module:
    """Load a model; refuse it if a parameter is missing in its files.

    Models without support for transformers' attention interface (GPT-J, GPT-Neo, Falcon) refuse ATTENTION_NAME. They
    are loaded with their own eager attention.
    """
    options = dict(dtype=torch.float32, use_safetensors=True, trust_remote_code=remote_code)
    for implementation in (ATTENTION_NAME, 'eager'):
        with suppress_transformers_logs(transformers):
            try:
                model, loading_info = transformers.AutoModelForCausalLM.from_pretrained(
                    model_dir, attn_implementation=implementation, output_loading_info=True, **options
                )
                break
            except Exception as error:  # errors of the config, of weights, or of missing packages
                if implementation == 'eager' or ATTENTION_NAME not in str(error):
                    raise make_load_error(name, error) from error
    if missing := sorted(map(str, [*loading_info['missing_keys'], *loading_info['mismatched_keys']])):
        raise UserError(f'{name} is half a checkpoint: {len(missing)} of its arrays are lacking ({missing[0]}, ...)')
    return model.eval()


def make_load_error(name: str, error: Exception) -> UserError:
    return UserError(f'{name} cannot be loaded by transformers {transformers.__version__}: {format_exception(error)}')


def make_position_kwargs(ids_PT: np.ndarray, position_T: np.ndarray) -> dict[str, torch.Tensor]:
    """Return the keyword arguments of a forward pass for token positions.

    The attention mask says that each row is one text. Without it transformers takes decreasing positions for the
    start of another text.
    """
    position_PT = np.broadcast_to(position_T, ids_PT.shape).copy()
    return dict(position_ids=torch.as_tensor(position_PT), attention_mask=torch.ones(ids_PT.shape))


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
