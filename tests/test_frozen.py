"""Tests that numbers and files match those of tests/frozen/record.py."""

import pytest
from frozen import record


def compare_section(section):
    """Compare a section in a separate process, which has the default XLA flags."""
    differences = record.check_section(section)
    assert not differences, '\n'.join(differences[:20])


@pytest.mark.slow
@pytest.mark.parametrize('section', ['configs', 'published', 'batches'])
def test_section_matches_record(section):
    compare_section(section)


@pytest.mark.exhaustive
@pytest.mark.parametrize('section', ['stores', 'training', 'rows', 'run'])
def test_section_with_long_computation_matches_record(section):
    compare_section(section)
