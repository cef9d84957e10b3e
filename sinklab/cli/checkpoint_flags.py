"""Arguments of commands that load a model: a run or an open model, --tokenizer, --bare and --cache=x+y."""

import argparse
import dataclasses
import re
import sys
from typing import TYPE_CHECKING, Any

from sinklab.config.spec import Spec
from sinklab.errors import UserError
from sinklab.run_dir import RunDir
from sinklab.run_ref import MODEL_PREFIXES, read_spec

if TYPE_CHECKING:
    import numpy as np
    from tokenizers import Tokenizer

    from sinklab.model.streaming import CacheConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser, 'run')
    parser.add_argument('--tokenizer', metavar='FILE', help='tokenizer.json of the run, if its token store is gone')
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


@dataclasses.dataclass(frozen=True)
class RunCheckpoint:
    """Checkpoint of a run at a step, with the spec of the run and the name under which messages show it."""

    run_dir: RunDir
    step: int
    spec: Spec
    name: str

    def __str__(self) -> str:
        return self.name

    def load_tokenizer(self, file: str | None) -> 'Tokenizer':
        """Load the tokenizer of the run, from a file with the same content if the original one is gone."""
        from sinklab.analysis.run_model import find_run_tokenizer
        from sinklab.data.tokenizer import load_tokenizer

        return load_tokenizer(find_run_tokenizer(self.run_dir, self.step, self.spec, file))

    def encode_text(self, text: str, bare: bool, tokenizer: 'Tokenizer') -> 'np.ndarray':
        """Encode a text; unless `bare`, add what training puts before texts, as complements of ids (negative)."""
        from sinklab.data.batches import add_training_tokens
        from sinklab.data.tokenizer import encode_long_text

        ids_T = encode_long_text(tokenizer, text)
        return ids_T if bare else add_training_tokens(ids_T, self.spec.data)

    def load_parameters(self) -> Any:
        """Restore the parameters of the checkpoint, verified, on the devices that compute with them."""
        from sinklab.checkpoint.checkpointer import restore_parameters
        from sinklab.train.generate import make_abstract_params

        return restore_parameters(self.run_dir.path, self.step, abstract_params=make_abstract_params(self.spec))


def load_checkpoint(model_ref: str) -> RunCheckpoint:
    """Load a checkpoint of a run, or that of an open model, which is imported into the cache.

    Remarks on the parameters are printed to standard error.
    """
    if model_ref.startswith(MODEL_PREFIXES):
        from sinklab.cli.hf import get_cached_import

        run_dir, step, name = get_cached_import(model_ref), 0, model_ref
    else:
        from sinklab.analysis.model_ref import resolve_checkpoint

        run_dir, step = resolve_checkpoint(model_ref, accepts_hf_models=True)
        name = f'{run_dir}@{step}'
    for remark in run_dir.read_remarks():
        print(f'{name}: {remark}', file=sys.stderr)
    return RunCheckpoint(run_dir, step, read_spec(run_dir), name)


def parse_cache(text: str, spec: Spec) -> 'CacheConfig':
    """Parse --cache=x+y into the size of a KV cache: x first and y recent tokens.

    Raises:
        UserError: The text is not x+y, or the model cannot use such a cache.
    """
    from sinklab.model.streaming import CacheConfig
    from sinklab.train.generate import check_streaming

    match = re.fullmatch(r'([0-9]+)\+([0-9]+)', text)
    if not match:
        raise UserError(
            f'--cache={text} is not a cache; give x+y, the numbers of first and of recent tokens, such as 4+1020'
        )
    kv_cache = CacheConfig(*map(int, match.groups()))
    if kv_cache.num_recent < 1 or kv_cache.size >= 2**31:
        raise UserError(f'--cache={text}: y must be at least 1, and x + y below 2^31')
    check_streaming(spec, kv_cache)
    return kv_cache
