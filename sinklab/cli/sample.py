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
from sinklab.cli.flag_types import add_options, non_negative_float, non_negative_int, positive_int
from sinklab.errors import UserError
from sinklab.run_dir import MODEL_PREFIXES

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NUM_FIRST_TOKENS = 4  # first tokens in the default cache


OPTIONS = {
    'tokens': (positive_int, 'N', 'maximum number of tokens (default: 100)'),
    'temperature': (non_negative_float, 'T', 'of sampling; 0 takes the most likely token (default: 1)'),
    'top_k': (positive_int, 'K', 'sample only from the K most likely tokens, such as 40 (default: from all)'),
    'seed': (non_negative_int, 'N', 'seed of sampling (default: 0)'),
    'cache': (str, 'x+y', f'such as 4+60 (default: x of {NUM_FIRST_TOKENS}, and x + y of a training window minus 1)'),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    checkpoint_flags.add_arguments(parser)
    parser.add_argument('--prompt', required=True, metavar='TEXT', help="text to continue, such as 'import '")
    add_options(parser, OPTIONS)
    parser.set_defaults(tokens=100, temperature=1.0, seed=0)


def run(args: argparse.Namespace, extra_args: list[str]) -> int:
    from sinklab.train import generate

    model = checkpoint_flags.load_checkpoint(args.run)
    if args.top_k is not None and args.top_k > model.vocabulary:
        raise UserError(
            f'--top_k is {args.top_k}; it must be a whole number from 1 to {model.vocabulary} (vocabulary)'
        )
    cache_text = args.cache or get_default_cache(model.spec.data.length)
    cache = checkpoint_flags.parse_cache(cache_text, model.spec)
    if args.run.startswith(MODEL_PREFIXES):
        print(f'{model.name}: computed in {model.dtype}', file=sys.stderr)
    ids_T = checkpoint_flags.encode_text(model, args.prompt, args.bare)
    sampler = generate.Sampler(args.temperature, args.top_k)
    generated_ids = generate.sample_tokens(model.spec, cache, model.params, ids_T, args.tokens, sampler, args.seed)
    print(args.prompt, end='', flush=True)
    for piece in decode_stream(model.tokenizer, ids_T[ids_T >= 0].tolist(), generated_ids):
        print(piece, end='', flush=True)
    print()
    return 0


def get_default_cache(length: int) -> str:
    """Return the default --cache: as many keys as a query sees besides itself in a training window."""
    first = min(NUM_FIRST_TOKENS, max(length - 2, 0))
    return f'{first}+{max(length - 1 - first, 1)}'


def decode_stream(tokenizer: 'Tokenizer', prompt_ids: list[int], generated_ids: Iterable[int]) -> Iterator[str]:
    """Decode generated tokens one by one, and yield new text once its UTF-8 characters are complete."""
    ids = list(prompt_ids)
    previous_text = tokenizer.decode(prompt_ids)
    for token_id in generated_ids:
        ids.append(token_id)
        current_text = tokenizer.decode(ids)
        if not current_text.endswith('\N{REPLACEMENT CHARACTER}'):
            yield current_text[len(previous_text) :]
            previous_text = current_text
    yield tokenizer.decode(ids)[len(previous_text) :]
