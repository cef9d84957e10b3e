"""Split of documents into train and held-out sides, and sample of a corpus."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stores import decode_documents, make_store, make_texts

from sinklab.data import held_out_split, sources
from sinklab.data.documents import Document, Source, SourcePiece
from sinklab.data.held_out_split import compute_key_threshold, hash_document_name


@settings(max_examples=40, deadline=None)
@given(
    st.text(st.characters(exclude_categories=['Cs']), min_size=1, max_size=80).map(lambda text: text * 2000),
    st.floats(0.01, 0.99),
    st.text('ab'),
)
def test_single_text_is_cut_into_train_and_held_out_sides(text, held_out, name):
    piece = SourcePiece(name, 1000, lambda: iter([Document(name, ((text, True),))]))
    source = held_out_split.split_single_text(Source((piece,), ()), held_out)
    documents = sorted(source.read_documents(), key=lambda document: document.name)
    assert ''.join(document.text for document in documents) == text
    if not text.strip():
        assert source.limit is None
        return
    held_out_documents = [document for document in documents if hash_document_name(document.name) < source.limit]
    assert len(held_out_documents) == 1
    assert not any(document.is_blank for document in documents)


@pytest.mark.parametrize('sample_chars', [1 << 26, 1000])  # characters: more than the text has, and fewer
def test_store_of_one_long_text_has_both_sides(tmp_path, monkeypatch, capsys, sample_chars):
    monkeypatch.setattr(held_out_split, 'SAMPLE_CHARS', sample_chars)
    text = ' '.join(make_texts(200))
    (tmp_path / 'long.txt').write_text(text)
    (tmp_path / 'blank.txt').write_text(' ')
    store = make_store(tmp_path / 'store', f'text:{tmp_path}/*.txt')
    (train_text,), (held_out_text,) = decode_documents(store, 'train'), decode_documents(store, 'held_out')
    split_index = len(train_text) if text == train_text + held_out_text else len(held_out_text)
    assert (text[:split_index], text[split_index:]) in ((train_text, held_out_text), (held_out_text, train_text))
    assert text[split_index].isspace()
    assert len(held_out_text) / len(text) == pytest.approx(0.2, abs=0.01)
    assert store.meta['dropped'] == {'empty': 1}
    assert '0.2' in capsys.readouterr().err


@settings(max_examples=50, deadline=None)
@given(st.sets(st.integers(0, 2**64 - 1), min_size=2, max_size=40), st.floats(0.01, 0.99))
def test_split_matches_held_out_fraction_without_empty_side(keys, held_out):
    num_held_out = sum(key < compute_key_threshold(list(keys), held_out) for key in keys)
    assert num_held_out == min(max(1, round(held_out * len(keys))), len(keys) - 1)


def test_survey_corpus_samples_texts_of_whole_corpus(tmp_path, monkeypatch):
    (tmp_path / 'texts').mkdir()
    for number in range(50):
        (tmp_path / 'texts' / f'{number:02}.txt').write_text(f'{number} ' + 'a word ' * 1000)
    monkeypatch.setattr(held_out_split, 'SAMPLE_CHARS', 40_000)
    limit, texts = held_out_split.survey_corpus(
        sources.open_source(f'text:{tmp_path}/texts/*.txt'), 0.2, with_texts=True
    )
    assert limit == int(0.2 * 2**64)
    assert 20_000 < sum(map(len, texts)) < 60_000
    assert len({text.split()[0] for text in texts}) == len(texts) > 20
