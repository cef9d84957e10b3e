"""Descriptions of the machine, from /proc/cpuinfo of several kinds of processors."""

import platform
from pathlib import Path

import pytest

from sinklab import machine

INTEL = 'cpu family\t: 6\nmodel\t\t: 207\nmodel name\t: Intel(R) Xeon(R) Processor\nflags\t\t: fpu avx512f\n\n'
ARM = 'BogoMIPS\t: 243.75\nFeatures\t: fp asimd\n\n'


@pytest.fixture
def write_cpu_info(monkeypatch):
    """Return a function that sets the text of /proc/cpuinfo; None: there is no such file."""

    def write(text):
        def read_text(path, **options):
            if text is None:
                raise FileNotFoundError
            return text

        monkeypatch.setattr(Path, 'read_text', read_text)

    return write


@pytest.mark.parametrize(
    ('cpu_info', 'name'),
    [
        (INTEL, 'Intel(R) Xeon(R) Processor'),
        ('model name\t: AMD EPYC\n', 'AMD EPYC'),
        (ARM, 'arm'),
        (None, 'arm'),
    ],
)
def test_processor_name_is_that_of_cpuinfo(write_cpu_info, monkeypatch, cpu_info, name):
    monkeypatch.setattr(platform, 'processor', lambda: 'arm')
    write_cpu_info(cpu_info)
    assert machine.get_processor_name() == name
    assert machine.describe_machine().startswith(f'{name}, ')


def test_processor_key_differs_between_instruction_sets(write_cpu_info):
    keys = set()
    for cpu_info in (INTEL, INTEL.replace('avx512f', 'avx2'), ARM, ARM.replace('asimd', 'sve'), None):
        write_cpu_info(cpu_info)
        keys.add(machine.make_processor_key())
    assert len(keys) == 5
