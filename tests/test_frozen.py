"""Tests that programs, numbers and files match those of tests/frozen/record.py."""

import pytest
from frozen import record


def compare_section(section, names=None):
    """Compare a section in a separate process, which has the default XLA flags."""
    if reason := record.explain_skip(section):
        pytest.skip(reason)
    differences = record.check_section(section, names)
    assert not differences, '\n'.join(differences[: record.MAX_PRINTED_LINES])


@pytest.mark.slow
@pytest.mark.parametrize('section', ['interface', 'batches'])
def test_section_matches_record(section):
    compare_section(section)


@pytest.mark.slow
def test_section_of_programs_matches_record_for_some_cases():
    compare_section('programs', ['sigmoid_apple', 'relative_t5', 'gate_elementwise', 'documents'])


@pytest.mark.exhaustive
@pytest.mark.parametrize('section', ['programs', 'stores', 'training', 'rows', 'run'])
def test_section_with_long_computation_matches_record(section):
    compare_section(section)
