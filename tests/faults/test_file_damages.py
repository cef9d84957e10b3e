"""Tests of corrupt files in a run folder: each is reported in one line, ignored or rejected."""

import random

import file_damages
import pytest

CASES = [(part, name, verb) for part, name in file_damages.CASES for verb in file_damages.COMMANDS]
SAMPLE = {*random.Random(0).sample(CASES, 8)}
# One case of each kind of earlier fault, in addition to the random sample.
SAMPLE |= {
    ('metrics', 'line null', 'report'),
    ('metrics', 'line without step', 'tail'),
    ('metrics', 'a FIFO', 'train'),
    ('row', 'row a number', 'report'),
    ('outcome', 'a list', 'report'),
    ('environment', 'attempts of numbers', 'tail'),
    ('lease', 'pid with a NUL', 'train'),
    ('lease', 'a folder', 'tail'),
    ('lock', 'a FIFO', 'train'),
    ('run', 'missing', 'measure'),
    ('digests', '100,000 nested brackets', 'train'),
    ('digests', 'size a text', 'verify'),
    ('probe', 'other layers', 'report'),
    ('kept', 'a number lacking', 'measure'),
}


@pytest.fixture(scope='module')
def damage_tester(tmp_path_factory):
    tester = file_damages.DamageTester(tmp_path_factory.mktemp('damages'))
    yield tester
    tester.close()


@pytest.mark.parametrize(
    ('part', 'name', 'verb'),
    [pytest.param(*case, marks=pytest.mark.slow if case in SAMPLE else pytest.mark.exhaustive) for case in CASES],
)
def test_corrupt_file_is_reported_or_ignored(damage_tester, part, name, verb):
    answer = damage_tester.run_on_damaged_copy(part, name, verb)
    assert answer['kind'] not in file_damages.BAD_KINDS, answer
