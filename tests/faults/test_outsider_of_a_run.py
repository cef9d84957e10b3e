"""Run of two processes with an unauthenticated client that attacks every port."""

import threading
import time

import pytest
from attacker import ATTACKS, list_listening_addresses
from job import assert_same_runs

pytest_plugins = ['started']
pytestmark = pytest.mark.exhaustive


def test_run_completes_under_unauthenticated_traffic_to_every_port(job_starter, undisturbed_run, tmp_path):
    job = job_starter(tmp_path / 'run', variables={'PAUSE': '0.4'})
    stop_event, known_addresses, threads = threading.Event(), set(), []
    while job.processes[0].poll() is None:
        addresses = {address for process in job.processes for address in list_listening_addresses(process.pid)}
        for address in addresses - known_addresses:
            threads += [threading.Thread(target=attack, args=(address, stop_event)) for attack in ATTACKS.values()]
        known_addresses |= addresses
        for thread in threads:
            if thread.ident is None:
                thread.start()
        time.sleep(0.2)
    codes, outputs = job.wait()
    stop_event.set()
    assert codes == [0, 0], outputs
    assert len(known_addresses) >= 2  # the coordination service of jax, and collectives between CPUs
    assert not {host for host, _ in known_addresses} & {'::', '0.0.0.0'}  # none of them on all interfaces
    assert_same_runs(tmp_path / 'run', undisturbed_run)
