"""RUN[@STEP] as a model that reads text, with the tokenizer of its training, and --cache=x+y."""

import argparse
import dataclasses
import re
from typing import TYPE_CHECKING, Any

from sinklab.config.spec import Spec
from sinklab.run_dir import RunDir
from sinklab.run_ref import read_spec
from sinklab.schema import (
    NonNegativeInt,
    PositiveInt,
    UserError,
    parse_value,
)

if TYPE_CHECKING:
    import numpy as np
    from tokenizers import Tokenizer

    from sinklab.model.streaming import CacheConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        'run',
        metavar='RUN[@STEP]',
        help='run folder, and one of its steps, such as runs/softmax@500 (default: the newest)',
    )
    parser.add_argument('--tokenizer', metavar='FILE', help='tokenizer.json of the run, if its token store is gone')
    parser.add_argument(
        '--bare', action='store_true', help='leave out the BOS or the fixed tokens that training put before texts'
    )


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """Add the argument of commands that take a run or an open model."""
    parser.add_argument(
        'model',
        metavar='RUN[@STEP] | hf:PATH_OR_ID',
        help='run folder, such as runs/softmax@500 (default: its newest step), or an open model, such as '
        'hf:openai-community/gpt2',
    )


@dataclasses.dataclass(frozen=True)
class RunCheckpoint:
    """A step of a run."""

    run_dir: RunDir
    step: int
    spec: Spec

    def __str__(self) -> str:
        return f'{self.run_dir}@{self.step}'

    def load_tokenizer(self, file: str | None) -> 'Tokenizer':
        """The one that the run was trained with, or a file that is the same."""
        from sinklab.analysis.run_model import find_run_tokenizer
        from sinklab.data import tokenizer

        return tokenizer.load_tokenizer(find_run_tokenizer(self.run_dir, self.step, self.spec, file))

    def encode_text(self, text: str, name: str, bare: bool, tokenizer: 'Tokenizer') -> 'np.ndarray':
        """Of a text, as training would show its beginning; what is put there stands as its complement."""
        from sinklab.data.probe_sequences import add_training_tokens
        from sinklab.data.tokenizer import encode_long_text

        ids_T = encode_long_text(tokenizer, text, name)
        return ids_T if bare else add_training_tokens(ids_T, self.spec.data)

    def load_parameters(self) -> Any:
        """Verified, and where they are computed with."""
        from sinklab.checkpoint import restore
        from sinklab.train.generate import make_abstract_params

        return restore.restore_parameters(
            self.run_dir.path, self.step, abstract_params=make_abstract_params(self.spec)
        )


def load_checkpoint(run_ref: str) -> RunCheckpoint:
    from sinklab.analysis.model_ref import resolve_checkpoint

    run_dir, step = resolve_checkpoint(run_ref)
    return RunCheckpoint(run_dir, step, read_spec(run_dir))


def parse_cache(text: str, spec: Spec) -> 'CacheConfig':
    """x+y, which the model can have."""
    from sinklab.model.streaming import CacheConfig
    from sinklab.train.generate import check_streaming

    match = re.fullmatch(r'([0-9]+)\+([0-9]+)', text)
    if not match:
        raise UserError(
            f'--cache={text} is no cache; give x+y, so many first and so many recent tokens, such as 4+1020'
        )
    first, recent = (int(number) for number in match.groups())
    flag_text = f'--cache={text}'
    kv_cache = CacheConfig(
        parse_value(NonNegativeInt, first, f'x of {flag_text}'), parse_value(PositiveInt, recent, f'y of {flag_text}')
    )
    parse_value(PositiveInt, kv_cache.size, f'x + y of {flag_text}')
    check_streaming(spec, kv_cache)
    return kv_cache
