"""Generate text with a run or an open model, from a prompt, with a KV cache of x first and y recent tokens.

The text ends after --tokens, or where the model ends the document.

example:
  sinklab sample runs/softmax --prompt='def attention(' --temperature=0.8 --top_k=40
  sinklab sample runs/softmax@500 --prompt='import ' --tokens=500 --cache=4+60
  sinklab sample gguf:SmolLM2.gguf --prompt='The capital of France is' --temperature=0 --tokens=20
"""

import argparse
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from sinklab.cli import checkpoint_flags
from sinklab.errors import UserError
from sinklab.run_ref import MODEL_PREFIXES
from sinklab.schema import NonNegativeFloat, PositiveInt, Seed, check_value

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NUM_FIRST_TOKENS = 4  # first tokens in the default cache


def add_arguments(parser: argparse.ArgumentParser) -> None:
    checkpoint_flags.add_arguments(parser)
    parser.add_argument('--prompt', required=True, metavar='TEXT', help="text to continue, such as 'import '")
    parser.add_argument(
        '--tokens', type=int, default=100, metavar='N', help='maximum number of tokens to generate (default: 100)'
    )
    parser.add_argument(
        '--temperature',
        type=float,
        default=1.0,
        metavar='T',
        help='temperature of sampling; 0 takes the most likely token each time (default: 1)',
    )
    parser.add_argument(
        '--top_k',
        type=int,
        metavar='K',
        help='sample only from the K most likely tokens, such as 40 (default: from all)',
    )
    parser.add_argument('--seed', type=int, default=0, metavar='N', help='seed of sampling (default: 0)')
    parser.add_argument(
        '--cache',
        metavar='x+y',
        help=f'cache of x first and y recent tokens, such as 4+60 (default: x of {NUM_FIRST_TOKENS}, and x '
        '+ y of a training '
        'window minus 1)',
    )


def run(args: argparse.Namespace, extra_args: list[str]) -> int:
    from sinklab.train import generate

    tokens, seed = check_value(PositiveInt, args.tokens, '--tokens'), check_value(Seed, args.seed, '--seed')
    temperature = check_value(NonNegativeFloat, args.temperature, '--temperature')
    checkpoint = checkpoint_flags.load_checkpoint(args.run)
    sampling_options = generate.Sampler(temperature, check_top_k(args.top_k, checkpoint.spec.model.vocabulary))
    cache = checkpoint_flags.parse_cache(
        get_default_cache(checkpoint.spec.data.length) if args.cache is None else args.cache, checkpoint.spec
    )
    if args.run.startswith(MODEL_PREFIXES):
        print(f'{checkpoint}: computed in {checkpoint.spec.model.dtype}', file=sys.stderr)
    tokenizer = checkpoint.load_tokenizer(args.tokenizer)
    ids_T = checkpoint.encode_text(check_prompt(args.prompt), args.bare, tokenizer)
    generated_ids = generate.sample_tokens(
        checkpoint.spec, cache, checkpoint.load_parameters(), ids_T, tokens, sampling_options, seed
    )
    print(args.prompt, end='', flush=True)
    for piece in decode_stream(tokenizer, ids_T[ids_T >= 0].tolist(), generated_ids):
        print(piece, end='', flush=True)
    print()
    return 0


def check_top_k(value: int | None, vocabulary: int) -> int | None:
    if value is not None and not 1 <= value <= vocabulary:
        raise UserError(f'--top_k is {value}; it must be a whole number from 1 to {vocabulary} (vocabulary)')
    return value


def get_default_cache(length: int) -> str:
    """Return the default --cache: as many keys as a query sees besides itself in a training window."""
    first = min(NUM_FIRST_TOKENS, max(length - 2, 0))
    return f'{first}+{max(length - 1 - first, 1)}'


def check_prompt(prompt: str) -> str:
    try:
        return prompt.encode().decode()
    except UnicodeEncodeError as error:
        raise UserError(f'--prompt is not UTF-8 (character {error.start}); give a text in UTF-8') from error


def decode_stream(tokenizer: 'Tokenizer', prompt_ids: list[int], generated_ids: Iterable[int]) -> Iterator[str]:
    """Decode generated tokens one by one, and yield new text once its UTF-8 characters are complete."""
    ids, previous_text = list(prompt_ids), tokenizer.decode(prompt_ids)
    for token_id in generated_ids:
        ids.append(token_id)
        current_text = tokenizer.decode(ids)
        if not current_text.endswith('\N{REPLACEMENT CHARACTER}'):
            yield current_text[len(previous_text) :]
            previous_text = current_text
    yield tokenizer.decode(ids)[len(previous_text) :]
