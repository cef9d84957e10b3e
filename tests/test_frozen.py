"""Programs, numbers and files are those that tests/frozen/record.py has recorded."""

import pytest
from frozen import record


def check(section, names=None):
    """Compare a section in a process of its own, which has the flags of XLA that users have."""
    if reason := record.explain_skip(section):
        pytest.skip(reason)
    differences = record.check_section(section, names)
    assert not differences, '\n'.join(differences[: record.SHOWN])


@pytest.mark.slow
@pytest.mark.parametrize('section', ['interface', 'batches'])
def test_a_section_is_as_recorded(section):
    check(section)


@pytest.mark.slow
def test_programs_of_some_cases_are_as_recorded():
    check('programs', ['sigmoid_apple', 'relative_t5', 'gate_elementwise', 'documents'])


@pytest.mark.exhaustive
@pytest.mark.parametrize('section', ['programs', 'stores', 'training', 'rows', 'run'])
def test_a_long_section_is_as_recorded(section):
    check(section)
