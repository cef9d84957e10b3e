"""A model of transformers as something to be measured."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from sinklab.llama.parity import quiet
from sinklab.measure.setting import Setting, completed
from sinklab.observe import hub
from sinklab.observe.showing import SEEN, Layer, Showing, cannot_run, reason
from sinklab.observe.subject import Keep, Watch, check_length, in_parts, unwatched
from sinklab.record import Refusal

KEYS = 10  # whose importance is told, of the paper
AT_ONCE = 1 << 26  # bytes of attention that one layer shows at once


class OpenModel:
    """In float32, without its head. `bos`: what its tokenizer does by itself (auto), none, or BOS by force."""

    def __init__(self, folder: str | Path, bos: str = 'auto', remote_code: bool = False, name: str = ''):
        self.folder, self.name, self.bos = Path(folder), name or f'hf:{folder}', bos
        check_attention(self.folder, self.name, remote_code)
        self.model = loaded(self.folder, self.name, remote_code)
        self.config = self.model.config.get_text_config()
        self.remote_code = remote_code
        self.vocabulary = self.config.vocab_size
        self.sinks = any(hasattr(part, 'sinks') for part in self.model.modules())
        self.show = Showing(self.model, self.name)
        layers = self.show.look()
        names = sorted({name for layer in layers for name in layer})
        self.reads = tuple(map(stacked, names))
        numbered = [*zip(self.show.numbers, layers, strict=True)]
        self.array_layers = {
            stacked(name): tuple(number for number, layer in numbered if name in layer) for name in names
        }
        self.heads = tuple(layer['attention_PHTS'].shape[1] for layer in layers if 'attention_PHTS' in layer)

    @functools.cached_property
    def digest(self) -> str:
        return f'{hub.digest(self.folder)} {self.bos}'

    @functools.cached_property
    def tokenizer(self) -> Any:
        try:
            with hub.explain_remote_code(self.name):
                found = transformers.AutoTokenizer.from_pretrained(self.folder, trust_remote_code=self.remote_code)
        except Refusal:
            raise
        except Exception as error:  # the library raises what its parts do
            said = ' '.join(str(error).split())[:200]
            raise Refusal(f'{self.name} has no tokenizer ({said}); give --inputs=random or repeated') from error
        if len(found) <= len(found.all_special_ids):  # what the library makes of nothing
            raise Refusal(f'{self.name} has no tokenizer, or one of no words; give --inputs=random or repeated')
        return found

    @property
    def without_attention(self) -> list[int]:
        """Return the layers, from 1, without an attention matrix: of state spaces, convolutions, linear attention."""
        having = self.array_layers['attention_LPHTS']
        return [number for number in range(1, len(self.show.layers) + 1) if number not in having]

    @property
    def remarks(self) -> tuple[str, ...]:
        """Return what is not measured of this model, and why, a sentence each."""
        found = []
        if lacking := self.without_attention:
            kinds = getattr(self.config, 'layer_types', None) or getattr(self.config, 'layers_block_type', None) or []
            kinds = dict.fromkeys(kinds[number - 1] for number in lacking if number <= len(kinds))
            told, count = ', '.join(map(str, lacking)), len(self.show.layers)
            told += f': {", ".join(kinds)}' if kinds else ''
            found.append(
                f'{len(lacking)} of {count} layers have no attention matrix ({told}); numbers of heads are of the '
                f'other {count - len(lacking)}'
            )
        if len(set(self.heads)) > 1:
            found.append(f'layers have {min(self.heads)} to {max(self.heads)} heads; each head of each counts once')
        if 'query_LPTHK' not in self.reads:
            found.append('it shows no queries, keys and values; numbers of these are left out')
        if 'residual_LPTD' not in self.reads:
            found.append('its layers do not return one hidden state a token; numbers of hidden states are left out')
        return tuple(found)

    @property
    def position(self) -> str:
        """What transformers does not say of all models in one way."""
        rotary = any('rotary' in type(part).__name__.lower() for part in self.model.modules())
        alibi = getattr(self.config, 'alibi', False) or self.config.model_type in ('bloom', 'mpt')
        return 'rotary' if rotary else 'alibi' if alibi else 'learned'

    def encode(self, text: str) -> list[int]:
        ids = self.tokenizer(text, add_special_tokens=self.bos == 'auto')['input_ids']
        if beyond := [one for one in ids if one >= self.vocabulary]:
            raise Refusal(
                f'the tokenizer of {self.name} gives the id {beyond[0]}, and the model has ids below '
                f'{self.vocabulary}: it is that of another model'
            )
        if self.bos != 'force':
            return ids
        begin = self.tokenizer.bos_token_id
        if begin is None:
            raise Refusal(f'{self.name} has no BOS; leave --bos=force out')
        return ids if ids[:1] == [begin] else [begin, *ids]

    def words(self, ids_T: np.ndarray) -> list[str]:
        return [self.tokenizer.decode([int(one)]) for one in ids_T]

    @property
    def longest(self) -> int | None:
        most = getattr(self.config, 'max_position_embeddings', None)
        return most if most and most > 0 else None  # XLNet says -1 where there is no limit

    def columns(self) -> list[str]:
        return ['(sink)'] * self.sinks

    def shaped(self, ids_PT: np.ndarray) -> np.ndarray:
        return ids_PT

    def setting(self, length: int, **more: Any) -> Setting:
        windows = self.windows(length)
        window = windows.pop() if len(windows) == 1 else None  # where layers differ, it is none of all
        found = dict(
            length=length, columns=int(self.sinks), implicit=self.sinks, gain=1.0, keys=min(KEYS, length), prefix=0
        )
        return Setting(**found | dict(window=window, reach=window or length, triggers=False) | more)

    def is_plain(self, length: int) -> bool:
        mixes = any(isinstance(part, torch.nn.Conv1d) for layer in self.show.layers for part in layer.modules())
        attention_alone = not self.without_attention and not mixes
        return self.windows(length) == {None} and not self.sinks and attention_alone

    def windows(self, length: int) -> set[int | None]:
        """Those of the layers that are short of the length."""
        kinds = getattr(self.config, 'layer_types', None) or ['sliding_attention']
        window = getattr(self.config, 'sliding_window', None)
        short = window if window and window < length else None
        return {short if kind == 'sliding_attention' else None for kind in kinds}

    def observe(
        self, ids_PT: np.ndarray, keep: Keep, position_T: np.ndarray | None = None, watch: Watch = unwatched
    ) -> dict[str, np.ndarray]:
        length = check_length(self, ids_PT)
        heads = self.config.num_attention_heads if len(set(self.heads)) == 1 else max(self.heads)
        rows = max(1, AT_ONCE // (4 * heads * length**2))
        setting = self.setting(length)

        def kept(layer: Layer) -> dict[str, np.ndarray]:
            return keep(completed({stacked(name): array[None] for name, array in layer.items()}, setting))

        def part(ids_PT: np.ndarray) -> dict[str, np.ndarray]:
            how = {} if position_T is None else placed(ids_PT, position_T)
            return of_layers(self.show(ids_PT, kept, **how))

        return in_parts(part, ids_PT, rows, watch)

    def loss(self, ids_PT: np.ndarray, position_T: np.ndarray | None = None) -> np.ndarray:
        length = check_length(self, ids_PT)

        def part(ids_PT: np.ndarray) -> dict[str, np.ndarray]:
            how = {} if position_T is None else placed(ids_PT, position_T)
            ids = torch.as_tensor(ids_PT, dtype=torch.long)
            with torch.inference_mode():
                try:
                    logits = self.model(input_ids=ids, use_cache=False, **how).logits[:, :-1]
                except Exception as error:
                    raise cannot_run(self.model, self.name, error) from error
                loss_PT = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction='none')
            return {'loss_LPT': loss_PT.numpy()[None]}

        return in_parts(part, ids_PT, max(1, AT_ONCE // (4 * length * self.vocabulary)))['loss_LPT'][0]


def check_attention(folder: Any, name: str, remote_code: bool) -> None:
    """Refuse a model whose config has no attention heads (Mamba, RWKV, xLSTM, ...) before its weights are read."""
    with quiet(transformers):
        try:
            config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=remote_code).get_text_config()
        except Exception as error:
            raise cannot_load(name, error) from error
    if getattr(config, 'num_attention_heads', None) is None:
        raise Refusal(
            f'{name} is of model type {config.model_type}, whose config has no attention heads '
            '(num_attention_heads): there is no attention to measure; give a model with attention'
        )


def loaded(folder: Any, name: str, remote_code: bool) -> torch.nn.Module:
    """Load the model, all of whose parameters must be in its files.

    Models that do not know transformers' attention interface refuse its name (GPT-J, GPT-Neo, Falcon) and are loaded
    with their own eager attention.
    """
    options = dict(dtype=torch.float32, use_safetensors=True, trust_remote_code=remote_code)
    for implementation in (SEEN, 'eager'):
        with quiet(transformers):
            try:
                model, told = transformers.AutoModelForCausalLM.from_pretrained(
                    folder, attn_implementation=implementation, output_loading_info=True, **options
                )
                break
            except Exception as error:  # of a config, of weights, of what a model wants installed: told in its words
                if implementation == 'eager' or SEEN not in str(error):
                    raise cannot_load(name, error) from error
    if lost := sorted(map(str, [*told['missing_keys'], *told['mismatched_keys']])):
        raise Refusal(f'{name} is half a checkpoint: {len(lost)} of its arrays are lacking ({lost[0]}, ...)')
    return model.eval()


def cannot_load(name: str, error: Exception) -> Refusal:
    return Refusal(f'{name} cannot be loaded by transformers {transformers.__version__}: {reason(error)}')


def placed(ids_PT: np.ndarray, position_T: np.ndarray) -> dict[str, torch.Tensor]:
    """With a mask that says that each is one text: else positions that fall are taken for the start of another."""
    position_PT = np.broadcast_to(position_T, ids_PT.shape).copy()
    return dict(position_ids=torch.as_tensor(position_PT), attention_mask=torch.ones(ids_PT.shape))


def stacked(name: str) -> str:
    """residual_PTD -> residual_LPTD."""
    return name.replace('_P', '_LP')


def of_layers(layers: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Return what is kept of all layers by name; a layer without attention has nothing of that."""
    names = dict.fromkeys(name for layer in layers for name in layer)
    return {name: concatenate(name, [layer[name] for layer in layers if name in layer]) for name in names}


def concatenate(name: str, arrays: list[np.ndarray]) -> np.ndarray:
    """Concatenate the arrays of layers, each (1, ...), along L; the letters of a name are its axes.

    Heads of different widths K are filled with zeros to the widest, which changes no norm, product or variance.
    Where layers differ in their number of heads, all heads stand beside each other as those of one layer, so that
    every head counts once in each mean, as it does where layers are alike.
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
    along = 'H' if 'H' in axes and len({array.shape[axes.index('H')] for array in arrays}) > 1 else 'L'
    return np.concatenate(arrays, axes.index(along) if along in axes else 0)
