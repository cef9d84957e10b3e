"""Runs on a token store in a bucket: equality with a local store, and a one-line error for a modified store."""

import functools

import jax
import numpy as np
import pytest
from bucket_stores import make_large_store, make_store_spec, upload_store
from conftest import draw_params
from stores import make_store, make_texts, write_chat
from tiny_runs import drop_clock_metrics, load_parameters, train_run

from sinklab.config.spec import Hardware
from sinklab.data.run_data import load_run_data
from sinklab.errors import UserError
from sinklab.parallel import device_mesh
from sinklab.storage.paths import get_file_system, parse_path
from sinklab.train.callbacks import Callback
from sinklab.train.validation_loss import load_eval_batches, make_validation_fn

pytestmark = pytest.mark.slow
SHORT_RUN_CHANGES = dict(data__length=16, checkpoint__every_steps=4)


@pytest.fixture(scope='module')
def store(tmp_path_factory):
    return make_large_store(tmp_path_factory.mktemp('large'), count=10)


@pytest.fixture(autouse=True)
def private_cache(tmp_path, monkeypatch):
    monkeypatch.setenv('SINKLAB_CACHE', str(tmp_path / 'cache'))


def test_run_on_bucket_matches_run_on_disk(store, bucket, tmp_path):
    specs = [make_store_spec(path, **SHORT_RUN_CHANGES) for path in (store.path, upload_store(store, bucket))]
    local_records, bucket_records = (train_run(spec, tmp_path / str(number)) for number, spec in enumerate(specs))
    assert drop_clock_metrics(local_records) == drop_clock_metrics(bucket_records)
    for local_array, bucket_array in zip(
        *(load_parameters(tmp_path / str(number), 8) for number in range(2)), strict=True
    ):
        np.testing.assert_array_equal(local_array, bucket_array)


def test_run_on_bucket_reads_each_window_once(store, bucket, tmp_path):
    spec = make_store_spec(upload_store(store, bucket), **SHORT_RUN_CHANGES)
    train_run(spec, tmp_path / 'run')
    requests = bucket.proxy.find_requests('train-')
    size = spec.optimizer.batch_size * spec.optimizer.steps * (spec.data.length + 1) * 2
    assert sum(request.response_bytes for request in requests) == size


def test_run_on_bucket_stops_with_one_line_if_store_is_modified(store, bucket, tmp_path):
    url = upload_store(store, bucket)

    class StoreModifier(Callback):
        def on_train_begin(self, *_):
            for shard in store.shards:
                get_file_system(parse_path(url)).pipe_file(f'{url}/{shard.name}.ids', bytes(2 * shard.tokens))

    with pytest.raises(UserError, match='changed') as error:
        train_run(make_store_spec(url, **SHORT_RUN_CHANGES), tmp_path / 'run', StoreModifier())
    assert '\n' not in str(error.value)


@pytest.mark.parametrize(('windows', 'micro_batch'), [(7, 8), (7, 2), (8, 4)])
def test_validation_windows_on_bucket_match_local_windows(bucket, tmp_path, windows, micro_batch):
    """Include tokens outside the loss, and parts that need padding."""
    conversations = [[('user', text), ('assistant', text)] for text in make_texts(60)]
    local_store = make_store(tmp_path / 'chat', write_chat(tmp_path / 'a.jsonl', conversations))
    specs = [
        make_store_spec(
            path, **SHORT_RUN_CHANGES, data__loss='assistant', valid__windows=windows, optimizer__batch_size=8
        )
        for path in (local_store.path, upload_store(local_store, bucket))
    ]
    hardware = Hardware(data=2, micro_batch=micro_batch)
    mesh = device_mesh.make_mesh(hardware)
    local_NT, bucket_NT = (load_run_data(spec).valid_NT for spec in specs)
    with jax.set_mesh(mesh):
        for local_part, bucket_part in zip(
            *(load_eval_batches(windows_NT, micro_batch, mesh) for windows_NT in (local_NT, bucket_NT)), strict=True
        ):
            np.testing.assert_array_equal(local_part, bucket_part)
        evaluate = functools.partial(make_validation_fn(specs[0], hardware, mesh), draw_params(specs[0]))
        assert evaluate(local_NT) == evaluate(bucket_NT)
        assert evaluate(local_NT)['valid/loss'] > 0


def test_compute_digest_depends_on_windows_and_shard_content(store, bucket):
    url = upload_store(store, bucket)
    batches = load_run_data(make_store_spec(url, **SHORT_RUN_CHANGES)).batches
    bucket.proxy.requests.clear()
    digests = {batches.compute_digest(step) for step in range(4)}
    assert len(digests) == 4
    assert not bucket.proxy.requests
    reloaded_batches = load_run_data(make_store_spec(url, **SHORT_RUN_CHANGES)).batches
    assert {reloaded_batches.compute_digest(step) for step in range(4)} == digests
    other_batches = load_run_data(make_store_spec(url, **SHORT_RUN_CHANGES, data__seed=1)).batches
    assert other_batches.compute_digest(0) not in digests
    file = f'{url}/{store.shards[0].name}.ids'
    get_file_system(parse_path(url)).pipe_file(file, get_file_system(parse_path(url)).cat_file(file)[:-2] + b'\1\0')
    assert load_run_data(make_store_spec(url, **SHORT_RUN_CHANGES)).batches.compute_digest(0) not in digests
