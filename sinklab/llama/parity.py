"""Whether transformers computes of a folder what is computed here: logits, attention and ids of text."""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from sinklab.data.tokens import tokenizer as tokens
from sinklab.llama.files import library
from sinklab.model.transformer import Transformer
from sinklab.record import Refusal
from sinklab.spec import Model, Spec

# Of the largest logit, or of 1; roundings of float32 add up with every layer.
TOLERANCE, SHALLOW = 1e-5, 4
USUAL, LONGEST = 64, 1024  # tokens that are compared; to see the end of a window, more
TEXT = 'The first token receives 42 % of the attention.\n\n    def sink(x): return x[0]  # naïve, 注意, ☃\n'


@dataclasses.dataclass(frozen=True)
class Found:
    """Differences, at most, and by what they were found."""

    logits: float
    attention: float
    version: str

    def __str__(self) -> str:
        told = f'logits within {self.logits:.1e} and attention within {self.attention:.1e}'
        return f'{told} of transformers {self.version}'


def libraries() -> None:
    for name in ('torch', 'transformers', 'safetensors'):
        library(name)


def check(folder: Path, spec: Spec, params: dict, length: int) -> Found:
    """Raises Refusal where a folder does not say what these parameters do."""
    same_ids(folder)
    ids_BT = sample(spec.model, length)
    ours, theirs = here(spec.model, params, ids_BT), there(folder, ids_BT)
    found = [float(np.abs(one - other).max()) for one, other in zip(ours, theirs, strict=True)]
    allowed = TOLERANCE * max(1.0, float(np.abs(ours[0]).max())) * max(1.0, spec.model.layers / SHALLOW)
    result = Found(*found, library('transformers').__version__)
    if not all(one <= allowed for one in found):
        raise Refusal(f'{result}, and {allowed:.1e} is allowed: what was written is not this model, and is deleted')
    return result


def sample(model: Model, length: int) -> np.ndarray:
    """Two sequences of ids, beyond the window where that is not far."""
    beyond = (model.mask.window or 0) + 8
    count = min(length, beyond if USUAL < beyond <= LONGEST else USUAL)
    return np.random.default_rng(0).integers(0, model.vocabulary, (2, count)).astype(np.int32)


def here(model: Model, params: dict, ids_BT: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(logits_BTV, attention_LBHTS) of one document each, in float32."""
    mask = dataclasses.replace(model.mask, document=False)
    model = dataclasses.replace(model, dtype='float32', mask=mask)
    graph, _ = nnx.split(nnx.eval_shape(lambda: Transformer(model, ids_BT.shape[1], nnx.Rngs(0))))

    @jax.jit
    def run(params: dict, ids_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits_BTV, captured = nnx.merge(graph, params)(ids_BT, capture=True)
        return logits_BTV, captured.attention_BHTS

    return tuple(map(np.asarray, run(params, ids_BT)))


def there(folder: Path, ids_BT: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same of transformers. Of other implementations than eager it gives no attention."""
    torch, transformers = library('torch'), library('transformers')
    how = dict(attn_implementation='eager', dtype=torch.float32, local_files_only=True, use_safetensors=True)
    how['trust_remote_code'] = False  # without a word transformers would ask, and run what a yes allows
    with quiet(transformers):
        model, told = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **how)
    if wrong := {key: sorted(map(str, value)) for key, value in told.items() if value}:
        raise Refusal(f'transformers reads {folder} with {wrong}')
    with torch.no_grad():
        given = torch.from_numpy(ids_BT.astype(np.int64))
        found = model.eval()(input_ids=given, output_attentions=True, use_cache=False)
    return found.logits.numpy(), np.stack([layer.numpy() for layer in found.attentions])


def same_ids(folder: Path) -> None:
    """Refuses a tokenizer that transformers reads as another one."""
    transformers, ours = library('transformers'), tokens.load(folder / 'tokenizer.json')
    with quiet(transformers):
        theirs = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        found = theirs(TEXT, add_special_tokens=False)['input_ids']
    if found != ours.encode(TEXT, add_special_tokens=False).ids:
        raise Refusal(f'transformers makes other ids of a text by {folder} than its tokenizer.json does here')


@contextlib.contextmanager
def quiet(transformers: Any) -> Iterator[None]:
    """Without bars and advice."""
    logging = transformers.utils.logging
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()
