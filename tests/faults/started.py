"""Fixtures of the tests of faults: jobs, and runs without faults."""

import os

import pytest
from job import Job


@pytest.fixture(scope='session')
def cache_variables():
    """Return variables by which processes share compiled programs and tokens."""
    cache = os.environ.get('SINKLAB_FAULTS_CACHE') or f'{os.environ["SINKLAB_TESTS_COMPILED"]}/faults'
    return {'SINKLAB_CACHE': cache, 'JAX_COMPILATION_CACHE_DIR': f'{cache}/programs'}


@pytest.fixture(scope='session')
def job_starter(corpus, cache_variables):
    """Yield a function that starts the processes of a run with shared caches."""
    jobs = []

    def start_job(workdir, count=2, *options, variables=None, **job_options):
        jobs.append(
            Job(workdir, corpus, count, *options, variables={**cache_variables, **(variables or {})}, **job_options)
        )
        return jobs[-1]

    yield start_job
    for job in jobs:
        job.kill()


@pytest.fixture(scope='session')
def undisturbed_run(job_starter, tmp_path_factory):
    """Train a run of two processes without faults, and return its folder."""
    path = tmp_path_factory.mktemp('undisturbed') / 'run'
    codes, outputs = job_starter(path).wait()
    assert codes == [0, 0], outputs
    return path


@pytest.fixture(scope='session')
def single_process_run(job_starter, tmp_path_factory):
    path = tmp_path_factory.mktemp('alone') / 'run'
    codes, outputs = job_starter(path, 1).wait()
    assert codes == [0], outputs
    return path
