"""Mixtures: several sources, each with its own domain."""

import json

import pytest
from stores import encode_lines, get_source_error, make_conversation, read_documents, write_mixture

from sinklab.data.sources import open_source


@pytest.fixture
def source_dir(tmp_path):
    (tmp_path / 'a.jsonl').write_bytes(encode_lines(['one', 'two']))
    (tmp_path / 'b.txt').write_text('three')
    (tmp_path / 'c.jsonl').write_text(json.dumps(make_conversation(('assistant', 'x'))))
    return tmp_path


def test_mixture_keeps_document_domains_and_normalizes_weights(source_dir):
    a, b = (dict(source=f'text:{source_dir}/{name}') for name in ('a.jsonl', 'b.txt'))
    mixture = write_mixture(source_dir, dict(A=a | dict(weight=3), B=b | dict(weight=1)))
    assert open_source(mixture).weights == (('A', 0.75), ('B', 0.25))
    assert [(document.domain, document.name, document.text) for document in read_documents(mixture)] == [
        ('A', 'A/a.jsonl:1', 'one'),
        ('A', 'A/a.jsonl:2', 'two'),
        ('B', 'B/b.txt', 'three'),
    ]
    assert open_source(write_mixture(source_dir, dict(A=a, B=b))).weights is None


@pytest.mark.parametrize(
    ('components', 'message'),
    [
        ({}, 'has no component'),
        (dict(A=dict(source='text:{}/a.jsonl', weight=1), B=dict(source='text:{}/b.txt')), 'has no weight for B'),
        (dict(A=dict(source='text:{}/a.jsonl', weight=-1)), '.weight'),
        (dict(A=dict(source='text:{}/a.jsonl', weight=10**400)), '.weight'),
        ({'A\nB': dict(source='text:{}/a.jsonl')}, 'use printable text'),
        (dict(A=dict(sorce='text:{}/a.jsonl')), 'sorce'),
        (dict(A=dict(source='text:{}/a.jsonl', wight=1)), 'wight'),
        (dict(A=dict(source='text:{}/none')), "'A', text:"),
        (dict(A=dict(source='mixture:{}/m.json')), 'is a mixture itself'),
        (dict(A=dict(source='text:{}/a.jsonl'), B=dict(source='chat:{}/c.jsonl')), 'mixes chat: with sources'),
    ],
)
def test_mixture_refuses_invalid_component(source_dir, components, message):
    for component in components.values():
        if 'source' in component:
            component['source'] = component['source'].format(source_dir)
    assert message in get_source_error(write_mixture(source_dir, components))
