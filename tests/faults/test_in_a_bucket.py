"""One run on two processes in a bucket, compared with a run on disk."""

import json
import re

import pytest
from job import assert_same_runs

pytest_plugins = ['started']
# One process in a bucket (test_buckets.py), and two on a disk (test_faults.py), are in `make test-slow`.
pytestmark = pytest.mark.exhaustive
# Files of process 1: shards of arrays, their metadata and their digests.
PROCESS_1_FILES = re.compile(r'/ocdbt\.process_1/|/array_metadatas/process_1|/digests_1\.json')


def check_writes(proxy):
    """Check that process 1, whose requests pass this proxy, writes its shards and nothing else."""
    write_requests = [request for request in proxy.requests if request.is_write]
    written_names = [name for request in write_requests for name in request.object_names or [request.path]]
    assert any('/ocdbt.process_1/' in name for name in written_names)
    assert [name for name in written_names if not PROCESS_1_FILES.search(name)] == []


def test_two_process_run_in_bucket_matches_run_on_disk(job_starter, undisturbed_run, bucket, emulator):
    process_1_bucket = emulator.add_proxy(bucket)
    workdir = f'{bucket.url}/run'
    codes, outputs = job_starter(
        workdir, variables=bucket.variables, process_overrides={1: dict(process_1_bucket.variables)}
    ).wait()
    assert codes == [0, 0], outputs
    assert_same_runs(workdir, undisturbed_run)
    check_writes(process_1_bucket.proxy)


def test_run_in_bucket_resumes_after_killed_process(job_starter, undisturbed_run, bucket, emulator, tmp_path):
    process_1_bucket = emulator.add_proxy(bucket)
    workdir = f'{bucket.url}/run'
    fault = dict(process=1, event=20, seconds=0, what='SIGKILL')
    fault_variables = {**bucket.variables, 'FAULT': json.dumps(fault), 'NOTES': str(tmp_path)}
    codes, outputs = job_starter(workdir, variables=fault_variables).wait()
    assert 0 not in codes, outputs
    codes, outputs = job_starter(
        workdir, variables=bucket.variables, process_overrides={1: dict(process_1_bucket.variables)}
    ).wait()
    assert codes == [0, 0], outputs
    assert_same_runs(workdir, undisturbed_run)
    check_writes(process_1_bucket.proxy)
