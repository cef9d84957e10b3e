"""Parsing and formatting of --seeds."""

from sinklab.errors import UserError

MAX_SEEDS = 1000  # more than anyone trains: a larger number is probably meant as one seed
SEEDS_HELP = "a count (3: seeds 0, 1, 2) or a comma-separated list ('0,2,5'; '2,' is seed 2 alone)"


def parse_seeds(text: str) -> list[int]:
    """Parse --seeds into a list of seeds.

    Args:
        text: A count N, for seeds 0 to N - 1, or a comma-separated list of different seeds; 'N,' is seed N alone.

    Raises:
        UserError: The text is neither, or the count is not from 1 to MAX_SEEDS.
    """
    count = parse_uint32(text)
    if count is not None and 1 <= count <= MAX_SEEDS:
        return list(range(count))
    if count is not None:
        raise UserError(
            f'--seeds={text} is a count, from 1 to {MAX_SEEDS}; for seed {count} alone give --seeds={count},'
        )
    parsed = [parse_uint32(seed) for seed in text.removesuffix(',').split(',')] if ',' in text else []
    seeds = [seed for seed in parsed if seed is not None]
    if not seeds or len(set(seeds)) < len(parsed):
        raise UserError(
            f'--seeds={text}: give a count, such as --seeds=3, or whole numbers from 0 to 2^32 - 1, each once, such '
            'as --seeds=0,1,2'
        )
    return seeds


def parse_uint32(text: str) -> int | None:
    """Parse a seed, a whole number from 0 to 2^32 - 1; return None if the text is not one."""
    if not (text.isascii() and text.isdecimal() and len(text) <= 10):
        return None
    number = int(text)
    return number if number < 2**32 else None


def format_seeds(seeds: list[int]) -> str:
    return ', '.join(map(str, seeds)) if len(seeds) < 6 else f'{seeds[0]} to {seeds[-1]}'
