"""One run on two processes in a bucket, compared with a run on disk."""

import json
import re

import pytest
from job import assert_same_runs

pytest_plugins = ['started']
# One process in a bucket (test_runs_in_buckets.py), and two on a disk (test_faults.py), are in `make test`.
pytestmark = pytest.mark.exhaustive
# Files of process 1: shards of arrays, their metadata and their digests.
ITS_OWN = re.compile(r'/ocdbt\.process_1/|/array_metadatas/process_1|/digests/\d+/1\.json')


def check_writes(proxy):
    """Check that process 1, whose requests pass this proxy, writes its shards and nothing else."""
    writes = [request for request in proxy.requests if request.writes]
    written = [name for request in writes for name in request.names or [request.path]]
    assert any('/ocdbt.process_1/' in name for name in written)
    assert [name for name in written if not ITS_OWN.search(name)] == []


def test_two_process_run_in_bucket_matches_run_on_disk(job_starter, undisturbed_run, bucket, emulators):
    own = emulators.another(bucket)
    workdir = f'{bucket.url}/run'
    codes, said = job_starter(workdir, variables=bucket.variables, each={1: dict(own.variables)}).wait()
    assert codes == [0, 0], said
    assert_same_runs(workdir, undisturbed_run)
    check_writes(own.proxy)


def test_run_in_bucket_resumes_after_killed_process(job_starter, undisturbed_run, bucket, emulators, tmp_path):
    own = emulators.another(bucket)
    workdir = f'{bucket.url}/run'
    fault = dict(process=1, event=20, seconds=0, what='SIGKILL')
    harmed = {**bucket.variables, 'FAULT': json.dumps(fault), 'NOTES': str(tmp_path)}
    codes, said = job_starter(workdir, variables=harmed).wait()
    assert codes == [42, 42], said
    codes, said = job_starter(workdir, variables=bucket.variables, each={1: dict(own.variables)}).wait()
    assert codes == [0, 0], said
    assert_same_runs(workdir, undisturbed_run)
    check_writes(own.proxy)
