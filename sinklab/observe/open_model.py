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
from sinklab.observe.showing import SEEN, Layer, Showing
from sinklab.observe.subject import Keep, Watch, check_length, in_parts, unwatched
from sinklab.record import Refusal

KEYS = 10  # whose importance is told, of the paper
AT_ONCE = 1 << 26  # bytes of attention that one layer shows at once


class OpenModel:
    """In float32, without its head. `bos`: what its tokenizer does by itself (auto), none, or BOS by force."""

    def __init__(self, folder: str | Path, bos: str = 'auto', remote_code: bool = False, name: str = ''):
        self.folder, self.name, self.bos = Path(folder), name or f'hf:{folder}', bos
        self.model = loaded(self.folder, self.name, remote_code)
        self.config = self.model.config.get_text_config()
        self.remote_code = remote_code
        self.vocabulary = self.config.vocab_size
        self.sinks = any(hasattr(part, 'sinks') for part in self.model.modules())
        self.show = Showing(self.model, self.config.num_hidden_layers)
        self.reads = tuple(map(stacked, sorted(self.show.look())))

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
        return getattr(self.config, 'max_position_embeddings', None)

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
        return self.windows(length) == {None} and not self.sinks

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
        rows = max(1, AT_ONCE // (4 * self.config.num_attention_heads * length**2))
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
                logits = self.model(input_ids=ids, use_cache=False, **how).logits[:, :-1]
                loss_PT = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction='none')
            return {'loss_LPT': loss_PT.numpy()[None]}

        return in_parts(part, ids_PT, max(1, AT_ONCE // (4 * length * self.vocabulary)))['loss_LPT'][0]


def loaded(folder: Any, name: str, remote_code: bool) -> torch.nn.Module:
    """The model, all of whose parameters are in its files."""
    options = dict(dtype=torch.float32, use_safetensors=True, trust_remote_code=remote_code)
    with quiet(transformers):
        try:
            model, told = transformers.AutoModelForCausalLM.from_pretrained(
                folder, attn_implementation=SEEN, output_loading_info=True, **options
            )
        except Exception as error:  # of a config, of weights, of what a model wants installed: told in its words
            raise Refusal(f'{name} cannot be loaded: {" ".join(str(error).split())[:300]}') from error
    if lost := sorted(map(str, [*told['missing_keys'], *told['mismatched_keys']])):
        raise Refusal(f'{name} is half a checkpoint: {len(lost)} of its arrays are lacking ({lost[0]}, ...)')
    return model.eval()


def placed(ids_PT: np.ndarray, position_T: np.ndarray) -> dict[str, torch.Tensor]:
    """With a mask that says that each is one text: else positions that fall are taken for the start of another."""
    position_PT = np.broadcast_to(position_T, ids_PT.shape).copy()
    return dict(position_ids=torch.as_tensor(position_PT), attention_mask=torch.ones(ids_PT.shape))


def stacked(name: str) -> str:
    """residual_PTD -> residual_LPTD."""
    return name.replace('_P', '_LP')


def of_layers(layers: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """What is kept of each, one after another; a layer without attention has nothing of that."""
    names = dict.fromkeys(name for layer in layers for name in layer)
    return {name: np.concatenate([layer[name] for layer in layers if name in layer]) for name in names}
