"""Run of two processes with an unauthenticated client that attacks every port."""

import threading
import time

import pytest
from attacker import ATTACKS, list_listening_addresses
from job import assert_same_runs

pytest_plugins = ['started']
pytestmark = pytest.mark.exhaustive  # test_supervisor_connection.py attacks one of the ports


def test_run_completes_under_unauthenticated_traffic_to_every_port(job_starter, undisturbed_run, tmp_path):
    begun = job_starter(tmp_path / 'run', variables={'PAUSE': '0.4'})
    ended, met, threads = threading.Event(), set(), []
    while begun.processes[0].poll() is None:
        addresses = {address for process in begun.processes for address in list_listening_addresses(process.pid)}
        for address in addresses - met:
            threads += [threading.Thread(target=attack, args=(address, ended)) for attack in ATTACKS.values()]
        met |= addresses
        for thread in threads:
            if thread.ident is None:
                thread.start()
        time.sleep(0.2)
    codes, said = begun.wait()
    ended.set()
    assert codes == [0, 0], said
    assert len(met) >= 2  # the coordination service of jax, and collectives between CPUs
    assert not {host for host, _ in met} & {'::', '0.0.0.0'}  # none of them on all interfaces
    assert_same_runs(tmp_path / 'run', undisturbed_run)
