"""Faults at one moment of a run, or at FAULTS_MOMENTS; what was seen goes to FAULTS_FIGURES, where that is given."""

import json
import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
SEEN = []


def pytest_generate_tests(metafunc):
    if 'moment' in metafunc.fixturenames:
        metafunc.parametrize('moment', range(int(os.environ.get('FAULTS_MOMENTS', 1))))


def pytest_sessionfinish():
    if file := os.environ.get('FAULTS_FIGURES'):
        Path(file).write_text(json.dumps(SEEN, indent=1) + '\n')


@pytest.fixture
def seen(request):
    """Notes a figure of this test."""
    return lambda **figures: SEEN.append({'test': request.node.name, **figures})


@pytest.fixture(scope='session')
def programs():
    """Variables of processes that find each other's compiled programs and tokens."""
    cache = os.environ.get('SINKLAB_FAULTS_CACHE') or f'{os.environ["SINKLAB_TESTS_COMPILED"]}/faults'
    return {'SINKLAB_CACHE': str(cache), 'JAX_COMPILATION_CACHE_DIR': f'{cache}/programs', 'XLA_FLAGS': ''}
