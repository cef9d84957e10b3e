"""Generate text with a trained model, from a prompt, with a KV cache of x first and y recent tokens.

The text ends after --tokens, or where the model ends the document.

example:
  sinklab sample runs/softmax --prompt='def attention(' --temperature=0.8 --top_k=40
  sinklab sample runs/softmax@500 --prompt='import ' --tokens=500 --cache=4+60
"""

import argparse
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from sinklab.cli import reader
from sinklab.record import Count, Nonnegative, Refusal, Seed, field

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FIRST = 4  # tokens of the beginning that are kept where no cache is given


def arguments(verb: argparse.ArgumentParser) -> None:
    reader.arguments(verb)
    verb.add_argument('--prompt', required=True, metavar='TEXT', help="text to go on from, such as 'import '")
    verb.add_argument(
        '--tokens', type=int, default=100, metavar='N', help='largest number of tokens to generate (default: 100)'
    )
    verb.add_argument(
        '--temperature',
        type=float,
        default=1.0,
        metavar='T',
        help='temperature of sampling; 0 takes the likeliest token each time (default: 1)',
    )
    verb.add_argument(
        '--top_k',
        type=int,
        metavar='K',
        help='sample from the K likeliest tokens alone, such as 40 (default: from all)',
    )
    verb.add_argument('--seed', type=int, default=0, metavar='N', help='seed of sampling (default: 0)')
    verb.add_argument(
        '--cache',
        metavar='x+y',
        help=f'cache of x first and y recent tokens, such as 4+60 (default: x of {FIRST}, and x + y of a training '
        'window less one)',
    )


def run(given: argparse.Namespace, rest: list[str]) -> int:
    if rest:
        raise Refusal(f'{rest[0]} is unknown; see sinklab sample --help')
    from sinklab.train import sampling

    tokens, seed = field(Count, given.tokens, '--tokens'), field(Seed, given.seed, '--seed')
    temperature = field(Nonnegative, given.temperature, '--temperature')
    model = reader.reader(given.run)
    choice = sampling.Choice(temperature, top_k(given.top_k, model.spec.model.vocabulary))
    cache = reader.cache(usual(model.spec.data.length) if given.cache is None else given.cache, model.spec)
    tokenizer = model.tokenizer(given.tokenizer)
    ids_T = model.ids(readable(given.prompt), '--prompt', given.bare, tokenizer)
    found = sampling.sample(model.spec, cache, model.parameters(), ids_T, tokens, choice, seed)
    print(given.prompt, end='', flush=True)
    for part in text(tokenizer, ids_T[ids_T >= 0].tolist(), found):
        print(part, end='', flush=True)
    print()
    return 0


def top_k(given: int | None, vocabulary: int) -> int | None:
    if given is not None and not 1 <= given <= vocabulary:
        raise Refusal(f'--top_k is {given}; it must be a whole number from 1 to {vocabulary}, the tokens there are')
    return given


def usual(length: int) -> str:
    """As many as a query of training sees beside itself."""
    first = min(FIRST, max(length - 2, 0))
    return f'{first}+{max(length - 1 - first, 1)}'


def readable(prompt: str) -> str:
    try:
        return prompt.encode().decode()
    except UnicodeEncodeError as error:
        raise Refusal(f'--prompt is not UTF-8 (character {error.start}); give a text in UTF-8') from error


def text(tokenizer: 'Tokenizer', before: list[int], following: Iterable[int]) -> Iterator[str]:
    """What each token adds to the text before it, as soon as its characters are whole."""
    ids, told = list(before), tokenizer.decode(before)
    for one in following:
        ids.append(one)
        now = tokenizer.decode(ids)
        if not now.endswith('\N{REPLACEMENT CHARACTER}'):
            yield now[len(told) :]
            told = now
    yield tokenizer.decode(ids)[len(told) :]
