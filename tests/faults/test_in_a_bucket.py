"""One run on two processes in a bucket, compared with a run on disk."""

import pytest
from job import assert_same_runs

pytest_plugins = ['started']
# One process in a bucket (test_buckets.py), and two on a disk (test_faults.py), are in `make test-slow`.
pytestmark = pytest.mark.exhaustive


def test_two_process_run_in_bucket_matches_run_on_disk(job_starter, undisturbed_run, bucket):
    workdir = f'{bucket.url}/run'
    codes, outputs = job_starter(workdir, variables=bucket.variables).wait()
    assert codes == [0, 0], outputs
    assert_same_runs(workdir, undisturbed_run)
