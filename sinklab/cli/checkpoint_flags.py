"""Arguments of commands that load a model: a run or an open model, --bare and --cache=x+y."""

import argparse
import re
import sys
from typing import TYPE_CHECKING

from sinklab.config.spec import Spec
from sinklab.errors import UserError
from sinklab.run_dir import MODEL_PREFIXES

if TYPE_CHECKING:
    import numpy as np

    from sinklab.analysis.run_model import RunModel
    from sinklab.model.streaming import CacheConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser, 'run')
    parser.add_argument(
        '--bare', action='store_true', help='omit the BOS or the fixed tokens that training put before texts'
    )


def add_model_argument(parser: argparse.ArgumentParser, name: str = 'model') -> None:
    """Add the positional argument for a run or an open model."""
    parser.add_argument(
        name,
        metavar='RUN[@STEP] | hf:PATH_OR_ID | gguf:PATH',
        help='run folder, such as runs/softmax@500 (default: its newest step), or an open model, such as '
        'hf:openai-community/gpt2 or gguf:SmolLM2.gguf',
    )


def load_checkpoint(model_ref: str) -> 'RunModel':
    """Load a checkpoint of a run, or that of an open model, which is imported into the cache.

    Remarks on the parameters are printed to standard error.
    """
    from sinklab.analysis.model_ref import resolve_checkpoint
    from sinklab.analysis.run_model import RunModel

    if model_ref.startswith(MODEL_PREFIXES):
        from sinklab.cli.hf import get_cached_import

        model = RunModel(get_cached_import(model_ref), 0)
        model.name = model_ref
    else:
        model = RunModel(*resolve_checkpoint(model_ref))
    for remark in model.remarks:
        print(f'{model.name}: {remark}', file=sys.stderr)
    return model


def encode_text(model: 'RunModel', text: str, bare: bool) -> 'np.ndarray':
    """Encode a text; unless `bare`, add what training puts before texts, as complements of ids (negative)."""
    from sinklab.data.batches import add_training_tokens
    from sinklab.data.tokenizer import encode_long_text

    ids_T = encode_long_text(model.tokenizer, text)
    return ids_T if bare else add_training_tokens(ids_T, model.spec.data)


def parse_cache(text: str, spec: Spec) -> 'CacheConfig':
    """Parse --cache=x+y into the size of a KV cache: x first and y recent tokens.

    Raises:
        UserError: The text is not x+y, or the model cannot use such a cache.
    """
    from sinklab.model.streaming import CacheConfig
    from sinklab.train.generate import check_streaming

    match = re.fullmatch(r'([0-9]{1,9})\+([1-9][0-9]{0,8})', text)
    if not match:
        raise UserError(
            f'--cache={text} is not a cache; give x+y, the numbers of first tokens and of recent ones (at least 1), '
            'such as 4+1020'
        )
    kv_cache = CacheConfig(*map(int, match.groups()))
    check_streaming(spec, kv_cache)
    return kv_cache
