"""A real run of two processes, a stranger at every port of which does all that he can without a secret."""

import threading
import time

import pytest
from job import assert_same
from outsider import ATTACKS, ports_of

pytest_plugins = ['started']
pytestmark = pytest.mark.exhaustive  # what each port answers a stranger is in test_outsider.py


def test_a_run_ends_well_whatever_a_stranger_sends_to_each_of_its_ports(job, undisturbed, tmp_path):
    begun = job(tmp_path / 'run', variables={'PAUSE': '0.4'})
    ended, met, threads = threading.Event(), set(), []
    while begun.processes[0].poll() is None:
        ports = {port for process in begun.processes for port in ports_of(process.pid)}
        for address in ports - met:
            threads += [threading.Thread(target=attack, args=(address, ended)) for attack in ATTACKS.values()]
        met |= ports
        for thread in threads:
            if thread.ident is None:
                thread.start()
        time.sleep(0.2)
    codes, said = begun.wait()
    ended.set()
    assert codes == [0, 0], said
    assert len(met) >= 3  # where the processes meet, jax's coordinator, and its collectives between CPUs
    assert not {host for host, _ in met} & {'::', '0.0.0.0'}  # none of them on all interfaces
    assert_same(tmp_path / 'run', undisturbed)
