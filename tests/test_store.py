"""Token stores: reading, verification, and rejection of damaged or mismatched stores."""

import hashlib
import json
import shutil

import numpy as np
import pytest
from conftest import make_tiny_spec
from hypothesis import given, settings
from hypothesis import strategies as st
from stores import (
    END_TOKEN,
    decode_documents,
    make_sharded_store,
    make_store,
    make_texts,
    save_foreign_tokenizer,
    write_mixture,
    write_source,
)

from sinklab.cli.main import main
from sinklab.data import store as store_module
from sinklab.data.prepare import open_corpus
from sinklab.data.run_data import load_run_data
from sinklab.data.store import IDS_SUFFIX, Store, decode_samples, find_problems
from sinklab.errors import UserError


@pytest.fixture(scope='module')
def store(tmp_path_factory):
    return make_sharded_store(tmp_path_factory.mktemp('made'))


@pytest.fixture
def store_copy(store, tmp_path):
    shutil.copytree(store.path, tmp_path / 'store')
    return tmp_path / 'store'


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.data())
def test_token_row_reads_shards_as_one_array(store, data):
    row = store.get_tokens('train', data.draw(st.sampled_from(store.domains)))
    ids = np.concatenate(
        [np.fromfile(store.path / f'{shard.name}.{IDS_SUFFIX}', store.dtype) for shard in row.shards]
    )
    assert len(row) == len(ids)
    start = data.draw(st.integers(0, len(ids) - 1))
    end = data.draw(st.integers(start + 1, len(ids)))
    np.testing.assert_array_equal(row.read_ids(start, end), ids[start:end])


def test_documents_keep_their_domain(store):
    assert store.domains == ['prose', 'code']
    for number, name in enumerate(store.domains):
        texts = decode_documents(store, 'train', name) + decode_documents(store, 'held_out', name)
        assert sorted(texts) == sorted(make_texts(40 * (number + 1), seed=number))


def test_meta_file_counts_match_store_content(store):
    for domain in store.meta['domains']:
        for split in ('train', 'held_out'):
            row = store.get_tokens(split, domain['name'])
            starts, _ = row.read_documents()
            texts = decode_documents(store, split, domain['name'])
            assert domain[split] == dict(
                documents=len(starts), tokens=len(row), bytes=sum(len(text.encode()) for text in texts)
            )
    assert list(find_problems(store, 300)) == []


DAMAGE_FUNCTIONS = {
    'truncated': lambda path: path.write_bytes(path.read_bytes()[:-2]),
    'flipped': lambda path: path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]),
    'missing': lambda path: path.unlink(),
    'longer': lambda path: path.write_bytes(path.read_bytes() + b'xx'),
}


def read_contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize('suffix', ['ids', 'documents'])
@pytest.mark.parametrize('kind', DAMAGE_FUNCTIONS)
def test_check_names_damaged_shard_and_leaves_store_unchanged(store_copy, kind, suffix, capsys):
    name = f'train-001-00001.{suffix}'
    DAMAGE_FUNCTIONS[kind](store_copy / name)
    old_contents = read_contents(store_copy)
    assert main(['prepare', f'--check={store_copy}']) == 1
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert name in lines[0]
    assert read_contents(store_copy) == old_contents


@pytest.mark.parametrize('suffix', ['ids', 'documents'])
def test_large_store_verifies_sizes_on_open_and_digests_on_check(store_copy, suffix, monkeypatch):
    monkeypatch.setattr(store_module, 'MAX_VERIFIED_BYTES', 0)
    name = f'train-001-00001.{suffix}'
    DAMAGE_FUNCTIONS['flipped'](store_copy / name)
    assert any(name in problem for problem in find_problems(Store(store_copy), 300))
    DAMAGE_FUNCTIONS['truncated'](store_copy / name)
    with pytest.raises(UserError, match=name):
        Store(store_copy)


def test_store_rejects_different_tokenizer(store_copy, tmp_path):
    save_foreign_tokenizer(tmp_path / 'other.json')
    with pytest.raises(UserError, match='tokenizer'):
        open_store_corpus(store_copy, tokenizer=str(tmp_path / 'other.json'))
    assert open_store_corpus(store_copy, tokenizer=str(store_copy / 'tokenizer.json'))
    shutil.copy(tmp_path / 'other.json', store_copy / 'tokenizer.json')
    with pytest.raises(UserError, match=r'tokenizer\.json'):
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
def test_store_rejects_config_that_differs_from_preparation(store, changes, field):
    with pytest.raises(UserError, match=rf'config\.{field}'):
        open_store_corpus(store.path, **changes)


def test_store_rejects_folder_without_valid_meta_file(tmp_path):
    with pytest.raises(UserError, match='sinklab prepare'):
        Store(tmp_path)
    (tmp_path / 'recipe.json').write_text('{}')
    with pytest.raises(UserError, match=r'prepare.* again'):
        Store(tmp_path)
    (tmp_path / 'meta.json').write_text('{')
    with pytest.raises(UserError, match=r'meta\.json'):
        Store(tmp_path)
    (tmp_path / 'meta.json').write_text('{"format": 1}')
    with pytest.raises(UserError, match='format'):
        Store(tmp_path)


INVALID_IDS = {
    'an end within a document': (IDS_SUFFIX, 3, END_TOKEN, 'token 0 does not end each document'),
    'no BOS': (IDS_SUFFIX, 0, 5, 'begin with token 1'),
    'an id beyond': (IDS_SUFFIX, 3, 65535, 'its largest id is 65535'),
}


@pytest.mark.parametrize('case', INVALID_IDS)
def test_check_finds_invalid_token_ids_with_matching_digests(store_copy, case):
    """Check a store with invalid token ids and matching digests."""
    suffix, index, value, message = INVALID_IDS[case]
    path, meta = store_copy / f'train-000-00000.{suffix}', json.loads((store_copy / 'meta.json').read_text())
    ids = np.fromfile(path, np.uint16)
    ids[index] = value
    ids.tofile(path)
    shard = next(shard for shard in meta['shards'] if shard['name'] == 'train-000-00000')
    shard['sha256'][suffix] = hashlib.sha256(path.read_bytes()).hexdigest()
    (store_copy / 'meta.json').write_text(json.dumps(meta))
    assert any(message in problem for problem in find_problems(Store(store_copy), 300))


def test_open_corpus_prepares_unchanged_source_once(tmp_path, capsys):
    source = write_source(tmp_path / 'a.jsonl', make_texts(20))
    data = make_tiny_spec(data__source=source).data
    first = open_corpus(data, 300)
    assert 'text:' in capsys.readouterr().err
    assert open_corpus(data, 300).digest == first.digest
    assert capsys.readouterr().err == ''
    write_source(tmp_path / 'a.jsonl', make_texts(21))
    assert open_corpus(data, 300).digest != first.digest
    assert len({first.digest, open_corpus(data, 290).digest}) == 2


def list_held_out_windows(path, domain, size):
    """Return all blocks of `size` ids from the files that meta.json lists for a domain, in file order."""
    shards = json.loads((path / 'meta.json').read_text())['shards']
    names = [shard['name'] for shard in shards if (shard['side'], shard['domain']) == ('held_out', domain)]
    ids = np.concatenate([np.fromfile(path / f'{name}.{IDS_SUFFIX}', np.uint16) for name in names])
    return ids[: len(ids) // size * size].reshape(-1, size).tolist()


@pytest.mark.parametrize('domain', ['prose', 'code'])
def test_validation_domain_reads_only_its_held_out_documents(store, domain):
    expected = list_held_out_windows(store.path, domain, 17)
    config = dict(data__source=f'store:{store.path}', data__bos='documents', data__held_out=0.2)
    config |= dict(valid__windows=len(expected))
    plain_data, domain_data = (
        load_run_data(make_tiny_spec(**config)),
        load_run_data(make_tiny_spec(**config, valid__domain=domain)),
    )
    assert sorted(domain_data.valid_NT.tolist()) == sorted(expected)
    assert domain_data.valid_NT.tolist() != expected
    assert not all(window in expected for window in plain_data.valid_NT.tolist())
    assert domain_data.fingerprint == plain_data.fingerprint
    for step in range(3):
        np.testing.assert_array_equal(
            domain_data.batches.read_rows(step, range(4)), plain_data.batches.read_rows(step, range(4))
        )
    with pytest.raises(UserError, match=f'{domain} .*{len(expected)} windows .*17'):
        load_run_data(make_tiny_spec(**config | dict(valid__windows=len(expected) + 1), valid__domain=domain))


def test_domain_without_documents_on_one_side_is_allowed_unless_sampled(tmp_path):
    parts = {
        name: dict(source=write_source(tmp_path / f'{name}.jsonl', texts))
        for name, texts in dict(one=make_texts(60), other=['alone']).items()
    }
    new_store = make_store(tmp_path / 'store', write_mixture(tmp_path, parts))
    splits = {split: len(new_store.get_tokens(split, 'other')) for split in ('train', 'held_out')}
    assert min(splits.values()) == 0
    assert max(splits.values()) > 0
    assert list(find_problems(new_store, 300)) == []
    assert len(decode_samples(new_store, 1)) == 2
    spec = make_tiny_spec(data__source=f'store:{tmp_path}/store', data__held_out=0.2)
    assert load_run_data(spec).probe_PT.shape == (5, 12)
    with pytest.raises(UserError, match=r"config\.probe\.domain.*'none'"):
        load_run_data(
            make_tiny_spec(data__source=f'store:{tmp_path}/store', data__held_out=0.2, probe__domain='none')
        )
    parts = {name: part | dict(weight=1) for name, part in parts.items()}
    with pytest.raises(UserError, match=r"'(train|held_out) other' .*0 tokens"):
        load_run_data(make_tiny_spec(data__source=write_mixture(tmp_path, parts), data__held_out=0.2))


@pytest.mark.parametrize('name', ['../train-000-00000', '/train-000-00000', 'train'])
def test_name_of_a_shard_that_is_no_plain_name_is_refused(store_copy, name):
    meta = json.loads((store_copy / 'meta.json').read_text())
    meta['shards'][0]['name'] = name
    (store_copy / 'meta.json').write_text(json.dumps(meta))
    with pytest.raises(UserError, match=r'meta\.json'):
        Store(store_copy)
