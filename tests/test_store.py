"""Token stores: reading, verification, and rejection of damaged or mismatched stores."""

import json
import shutil

import numpy as np
import pytest
from commands import get_error_line
from hypothesis import given, settings
from hypothesis import strategies as st
from stores import (
    decode_documents,
    make_sharded_store,
    make_store,
    make_texts,
    save_foreign_tokenizer,
    write_mixture,
    write_source,
)
from tiny_specs import make_tiny_spec

from sinklab.data import store as store_module
from sinklab.data.run_data import load_run_data, open_corpus
from sinklab.data.store import IDS_SUFFIX, Store
from sinklab.errors import UserError


@pytest.fixture(scope='module')
def store(tmp_path_factory):
    return make_sharded_store(tmp_path_factory.mktemp('made'))


@pytest.fixture
def store_copy(store, tmp_path):
    shutil.copytree(store.path, tmp_path / 'store')
    return tmp_path / 'store'


def read_split(store, split, domain):
    """Return the ids in the files that meta.json lists for a split of a domain."""
    shards = json.loads((store.path / 'meta.json').read_text())['shards']
    names = [shard['name'] for shard in shards if (shard['side'], shard['domain']) == (split, domain)]
    return np.concatenate([np.fromfile(store.path / f'{name}.{IDS_SUFFIX}', store.dtype) for name in names])


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.data())
def test_token_array_reads_shards_as_one_array(store, data):
    domain = data.draw(st.sampled_from(store.domains))
    tokens, ids = store.get_tokens('train', domain), read_split(store, 'train', domain)
    assert len(tokens) == len(ids)
    start = data.draw(st.integers(0, len(ids) - 1))
    end = data.draw(st.integers(start + 1, len(ids)))
    np.testing.assert_array_equal(tokens.read_ids(start, end), ids[start:end])


def test_documents_keep_their_domain_and_are_counted(store):
    assert store.domains == ['prose', 'code']
    for number, domain in enumerate(store.meta['domains']):
        texts = {split: decode_documents(store, split, domain['name']) for split in ('train', 'held_out')}
        assert sorted([*texts['train'], *texts['held_out']]) == sorted(make_texts(40 * (number + 1), seed=number))
        for split, split_texts in texts.items():
            assert domain[split] == dict(
                documents=len(split_texts),
                tokens=len(read_split(store, split, domain['name'])),
                bytes=sum(len(text.encode()) for text in split_texts),
            )


DAMAGE_FUNCTIONS = {
    'truncated': lambda path: path.write_bytes(path.read_bytes()[:-2]),
    'flipped': lambda path: path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]),
    'missing': lambda path: path.unlink(),
}


@pytest.mark.parametrize('name', ['train-001-00001.ids', 'train-001-00001.documents', 'probe.npz', 'tokenizer.json'])
@pytest.mark.parametrize('kind', DAMAGE_FUNCTIONS)
def test_damaged_file_is_named_and_left_unchanged(store_copy, kind, name, capsys):
    DAMAGE_FUNCTIONS[kind](store_copy / name)
    contents = {path.name: path.read_bytes() for path in store_copy.iterdir()}
    with pytest.raises(UserError, match=name):
        Store(store_copy)
    assert name in get_error_line(capsys, 'prepare', f'--check={store_copy}')
    assert {path.name: path.read_bytes() for path in store_copy.iterdir()} == contents


def test_large_store_verifies_sizes_on_open_and_digests_on_check(store_copy, monkeypatch):
    monkeypatch.setattr(store_module, 'MAX_VERIFIED_BYTES', 0)
    name = 'train-001-00001.ids'
    DAMAGE_FUNCTIONS['flipped'](store_copy / name)
    Store(store_copy)
    with pytest.raises(UserError, match=name):
        Store(store_copy, verify=True)
    DAMAGE_FUNCTIONS['truncated'](store_copy / name)
    with pytest.raises(UserError, match=name):
        Store(store_copy)


def test_folder_without_finished_store_is_refused(tmp_path):
    contents = [{}, {'recipe.json': '{}'}, {'meta.json': '{'}, {'meta.json': '{"format": 1}'}]
    for number, files in enumerate(contents):
        (tmp_path / str(number)).mkdir()
        for name, content in files.items():
            (tmp_path / str(number) / name).write_text(content)
        with pytest.raises(UserError, match=f'{tmp_path}/{number}'):
            Store(tmp_path / str(number))


@pytest.mark.parametrize('name', ['../train-000-00000', '/train-000-00000', 'train'])
def test_name_of_a_shard_that_is_no_plain_name_is_refused(store_copy, name):
    meta = json.loads((store_copy / 'meta.json').read_text())
    meta['shards'][0]['name'] = name
    (store_copy / 'meta.json').write_text(json.dumps(meta))
    with pytest.raises(UserError, match=r'meta\.json'):
        Store(store_copy)


def open_store_corpus(path, vocabulary=300, **changes):
    defaults = dict(source=f'store:{path}', bos='documents', held_out=0.2)
    data = make_tiny_spec(**{f'data__{name}': value for name, value in (defaults | changes).items()}).data
    return open_corpus(data, vocabulary)


@pytest.mark.parametrize(
    ('changes', 'field'),
    [
        (dict(bos='none'), 'data.bos'),
        (dict(held_out=0.1), 'data.held_out'),
        (dict(end_token=7), 'data.end_token'),
        (dict(fixed_token=7), 'data.fixed_token'),
        (dict(loss='assistant'), 'data.loss'),
        (dict(vocabulary=260), 'model.vocabulary'),
    ],
)
def test_config_that_differs_from_preparation_is_refused(store, changes, field):
    with pytest.raises(UserError, match=rf'config\.{field}'):
        open_store_corpus(store.path, **changes)


def test_other_tokenizer_is_refused(store, tmp_path):
    save_foreign_tokenizer(tmp_path / 'other.json')
    with pytest.raises(UserError, match='tokenizer'):
        open_store_corpus(store.path, tokenizer=str(tmp_path / 'other.json'))
    assert open_store_corpus(store.path, tokenizer=str(store.path / 'tokenizer.json')).digest == store.digest


def test_open_corpus_prepares_unchanged_source_once(tmp_path, capsys):
    source = write_source(tmp_path / 'a.jsonl', make_texts(20))
    data = make_tiny_spec(data__source=source).data
    first = open_corpus(data, 300)
    assert source in capsys.readouterr().err
    assert open_corpus(data, 300).digest == first.digest
    assert capsys.readouterr().err == ''
    write_source(tmp_path / 'a.jsonl', make_texts(21))
    assert len({first.digest, open_corpus(data, 300).digest, open_corpus(data, 290).digest}) == 3


@pytest.mark.parametrize('domain', ['prose', 'code'])
def test_validation_domain_reads_only_its_held_out_documents(store, domain):
    ids = read_split(store, 'held_out', domain)
    expected = ids[: len(ids) // 17 * 17].reshape(-1, 17).tolist()
    config = dict(data__source=f'store:{store.path}', data__bos='documents', data__held_out=0.2)
    plain_data = load_run_data(make_tiny_spec(**config, valid__windows=len(expected)))
    domain_data = load_run_data(make_tiny_spec(**config, valid__windows=len(expected), valid__domain=domain))
    assert sorted(domain_data.valid_NT.tolist()) == sorted(expected)
    assert domain_data.fingerprint == plain_data.fingerprint
    batches = [run_data.batches.read_rows(2, range(4)) for run_data in (domain_data, plain_data)]
    np.testing.assert_array_equal(*batches)
    with pytest.raises(UserError, match=domain):
        load_run_data(make_tiny_spec(**config, valid__windows=len(expected) + 1, valid__domain=domain))


def test_domain_without_documents_in_one_split_is_allowed_unless_sampled(tmp_path):
    texts = dict(one=make_texts(60), other=['alone'])
    parts = {name: dict(source=write_source(tmp_path / f'{name}.jsonl', texts[name])) for name in texts}
    new_store = make_store(tmp_path / 'store', write_mixture(tmp_path, parts))
    assert [bool(len(new_store.get_tokens(split, 'other'))) for split in ('train', 'held_out')].count(False) == 1
    assert len(new_store.decode_beginnings(1)) == 2
    config = dict(data__source=f'store:{tmp_path}/store', data__held_out=0.2)
    assert load_run_data(make_tiny_spec(**config)).probe_PT.shape == (5, 12)
    with pytest.raises(UserError, match=r'config\.probe\.domain'):
        load_run_data(make_tiny_spec(**config, probe__domain='none'))
    weighted = write_mixture(tmp_path, {name: part | dict(weight=1) for name, part in parts.items()})
    with pytest.raises(UserError, match='other'):
        load_run_data(make_tiny_spec(data__source=weighted, data__held_out=0.2))
