"""Descriptions of processors, from /proc/cpuinfo of several kinds."""

import platform
from pathlib import Path

import pytest

from benchmarks.machine import describe_machine
from sinklab.environment import make_processor_key

INTEL = 'cpu family\t: 6\nmodel\t\t: 207\nmodel name\t: Intel(R) Xeon(R) Processor\nflags\t\t: fpu avx512f\n\n'
ARM = 'BogoMIPS\t: 243.75\nFeatures\t: fp asimd\n\n'


@pytest.mark.parametrize(
    ('cpu_info', 'name'),
    [(INTEL, 'Intel(R) Xeon(R) Processor'), ('model name\t: AMD EPYC\n', 'AMD EPYC'), (ARM, 'arm')],
)
def test_processor_name_is_that_of_cpuinfo(monkeypatch, cpu_info, name):
    monkeypatch.setattr(platform, 'processor', lambda: 'arm')
    monkeypatch.setattr(Path, 'read_text', lambda path, **options: cpu_info)
    assert describe_machine().startswith(f'{name}, ')


def test_processor_key_differs_between_instruction_sets(monkeypatch):
    keys = set()
    for cpu_info in (INTEL, INTEL.replace('avx512f', 'avx2'), ARM, ARM.replace('asimd', 'sve'), ''):
        monkeypatch.setattr(Path, 'read_text', lambda path, text=cpu_info, **options: text)
        keys.add(make_processor_key())
    assert len(keys) == 5
