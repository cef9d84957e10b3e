"""RUN[@STEP] as a model that reads text, with the tokenizer of its training, and --cache=x+y."""

import argparse
import dataclasses
import re
from typing import TYPE_CHECKING, Any

from sinklab.folder import Folder
from sinklab.named import spec_of
from sinklab.record import Count, Natural, Refusal, field
from sinklab.spec import Spec

if TYPE_CHECKING:
    import numpy as np
    from tokenizers import Tokenizer

    from sinklab.model.streaming import Cache


def arguments(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        'run',
        metavar='RUN[@STEP]',
        help='run folder, and one of its steps, such as runs/softmax@500 (default: the newest)',
    )
    verb.add_argument('--tokenizer', metavar='FILE', help='tokenizer.json of the run, if its token store is gone')
    verb.add_argument(
        '--bare', action='store_true', help='leave out the BOS or the fixed tokens that training put before texts'
    )


def model_argument(verb: argparse.ArgumentParser) -> None:
    """Add the argument of commands that take a run or an open model."""
    verb.add_argument(
        'model',
        metavar='RUN[@STEP] | hf:PATH_OR_ID',
        help='run folder, such as runs/softmax@500 (default: its newest step), or an open model, such as '
        'hf:openai-community/gpt2',
    )


@dataclasses.dataclass(frozen=True)
class Reader:
    """A step of a run."""

    folder: Folder
    step: int
    spec: Spec

    def __str__(self) -> str:
        return f'{self.folder}@{self.step}'

    def tokenizer(self, file: str | None) -> 'Tokenizer':
        """The one that the run was trained with, or a file that is the same."""
        from sinklab.data.tokens import tokenizer
        from sinklab.observe.own import tokenizer_of

        return tokenizer.load(tokenizer_of(self.folder, self.step, self.spec, file))

    def ids(self, text: str, name: str, bare: bool, tokenizer: 'Tokenizer') -> 'np.ndarray':
        """Of a text, as training would show its beginning; what is put there stands as its complement."""
        from sinklab.data.sequences.prompts import shaped
        from sinklab.data.tokens.encode import ids_of_text

        ids_T = ids_of_text(tokenizer, text, name)
        return ids_T if bare else shaped(ids_T, self.spec.data)

    def parameters(self) -> Any:
        """Verified, and where they are computed with."""
        from sinklab.checkpoint import restore
        from sinklab.train.streaming import parameters

        return restore.parameters(self.folder.path, self.step, abstract=parameters(self.spec))


def reader(given: str) -> Reader:
    from sinklab.observe.opening import step_of

    folder, step = step_of(given)
    return Reader(folder, step, spec_of(folder))


def cache(words: str, spec: Spec) -> 'Cache':
    """x+y, which the model can have."""
    from sinklab.model.streaming import Cache
    from sinklab.train.streaming import check

    found = re.fullmatch(r'([0-9]+)\+([0-9]+)', words)
    if not found:
        raise Refusal(
            f'--cache={words} is no cache; give x+y, so many first and so many recent tokens, such as 4+1020'
        )
    first, recent = (int(number) for number in found.groups())
    at = f'--cache={words}'
    made = Cache(field(Natural, first, f'x of {at}'), field(Count, recent, f'y of {at}'))
    field(Count, made.size, f'x + y of {at}')
    check(spec, made)
    return made
