"""Parsing of --seeds."""

import re

from sinklab.errors import UserError

MAX_SEEDS = 1000  # more than anyone trains: a larger number is probably meant as one seed
SEEDS_HELP = "a count (3: seeds 0, 1, 2) or a comma-separated list ('0,2,5'; '2,' is seed 2 alone)"


def parse_seeds(text: str) -> list[int]:
    """Parse --seeds: a count N, for seeds 0 to N - 1, or a comma-separated list; 'N,' is seed N alone.

    Raises:
        UserError: The text is neither, the count is not from 1 to MAX_SEEDS, or a seed is given twice.
    """
    if not re.fullmatch(r'[0-9]{1,10}(,[0-9]{1,10})*,?', text):
        raise UserError(f'--seeds={text}: give {SEEDS_HELP}')
    numbers = [int(number) for number in text.removesuffix(',').split(',')]
    if ',' not in text:
        if not 1 <= numbers[0] <= MAX_SEEDS:
            raise UserError(f'--seeds={text} is a count, from 1 to {MAX_SEEDS}; for one seed give --seeds={text},')
        return list(range(numbers[0]))
    if len(set(numbers)) < len(numbers) or max(numbers) >= 2**32:
        raise UserError(f'--seeds={text}: give whole numbers below 2^32, each once')
    return numbers
