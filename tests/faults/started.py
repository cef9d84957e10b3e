"""What the tests of this folder have in common: jobs that they start, and runs that nothing happened to."""

import os

import pytest
from job import Job


@pytest.fixture(scope='session')
def programs():
    """Variables of processes that find each other's compiled programs and tokens."""
    cache = os.environ.get('SINKLAB_FAULTS_CACHE') or f'{os.environ["SINKLAB_TESTS_COMPILED"]}/faults'
    return {'SINKLAB_CACHE': cache, 'JAX_COMPILATION_CACHE_DIR': f'{cache}/programs'}


@pytest.fixture(scope='session')
def job(corpus, programs):
    """Starts processes of a run that find what others have compiled."""
    started = []

    def start(workdir, count=2, *options, variables=None, **more):
        started.append(Job(workdir, corpus, count, *options, variables={**programs, **(variables or {})}, **more))
        return started[-1]

    yield start
    for one in started:
        one.kill()


@pytest.fixture(scope='session')
def undisturbed(job, tmp_path_factory):
    """A run of two processes that nothing happened to."""
    path = tmp_path_factory.mktemp('undisturbed') / 'run'
    codes, said = job(path).wait()
    assert codes == [0, 0], said
    return path


@pytest.fixture(scope='session')
def alone(job, tmp_path_factory):
    path = tmp_path_factory.mktemp('alone') / 'run'
    codes, said = job(path, 1).wait()
    assert codes == [0], said
    return path
