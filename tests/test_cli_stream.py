"""Tests of the commands `sinklab stream` and `sinklab sample`."""

import json
import shutil

import numpy as np
import pytest
import streaming_reference
from commands import get_error_line, run_command
from tiny_runs import make_spec
from tiny_specs import make_tiny_spec

from sinklab.checkpoint import checkpointer
from sinklab.cli import sample, stream
from sinklab.data.batches import add_training_tokens
from sinklab.data.run_data import open_corpus as open_stored_corpus
from sinklab.errors import UserError
from sinklab.loss_mask import exclude_from_loss
from sinklab.run_dir import RunDir, read_spec

TEXT = 'abc dab nop lmk ab efgh ponm a kl'  # letters of the test corpus
BEGIN = 1  # the fixed token and BOS


@pytest.fixture
def text_path(tmp_path):
    path = tmp_path / 'book.txt'
    path.write_text(TEXT, encoding='utf-8')
    return path


def encode_text(corpus):
    tokenizer = open_stored_corpus(make_spec(corpus).data, 300).load_tokenizer()
    return np.array(tokenizer.encode(TEXT, add_special_tokens=False).ids)


@pytest.mark.slow
def test_stream_perplexity_of_each_cache_matches_reference(finished_run, corpus, text_path, capsys):
    path, _ = finished_run
    code, out, _ = run_command(capsys, 'stream', f'{path}@4', f'--text={text_path}', '--cache=0+5,2+3', '--json')
    assert code == 0
    ids, params = encode_text(corpus), checkpointer.restore_parameters(path, 4)
    rows = json.loads(out)
    assert [row['cache'] for row in rows] == ['0+5', '2+3']
    for row, (first, recent) in zip(rows, ((0, 5), (2, 3)), strict=True):
        expected = streaming_reference.compute_perplexity(
            streaming_reference.compute_logits(params, ids, make_spec(corpus), first, recent)[:-1], ids[1:]
        )
        assert row['perplexity'] == pytest.approx(expected, rel=1e-4)
        assert row['loss'] == pytest.approx(np.log(expected), rel=1e-4)
        assert row['predicted'] == len(ids) - 1
        assert row['tokens_per_second'] > 0
        assert row['dtype'] == make_spec(corpus).model.dtype


@pytest.mark.slow
def test_stream_table_has_default_caches_and_published_values(finished_run, tmp_path, text_path, capsys):
    run_path = shutil.copytree(finished_run[0], tmp_path / 'run')
    (run_path / 'row.json').write_text(json.dumps(dict(published={'perplexity/1+7': 18.49})))
    code, out, _ = run_command(capsys, 'stream', run_path, f'--text={text_path}')
    assert code == 0
    heading, columns, *lines = out.splitlines()
    assert heading.startswith(f'{run_path}@8, ')
    assert heading.endswith(read_spec(RunDir(run_path)).model.dtype)
    assert columns.split() == ['cache', 'perplexity', 'published', 'tokens/s']
    cells = [line.split() for line in lines]
    assert [(row[0], row[2]) for row in cells] == [('0+8', '-'), ('1+7', '18.49'), ('2+6', '-'), ('4+4', '-')]
    assert stream.list_default_caches(2048) == ['0+1024', '1+1023', '2+1022', '4+1020']
    assert stream.list_default_caches(2) == ['0+1']


@pytest.mark.slow
def test_sample_continues_prompt_and_is_deterministic_per_seed(finished_run, capsys):
    arguments = 'sample', finished_run[0], '--prompt=abc d', '--tokens=12', '--cache=2+3'
    code, out, _ = run_command(capsys, *arguments)
    assert code == 0
    assert out.startswith('abc d')
    assert len(out) > len('abc d\n')
    assert run_command(capsys, *arguments)[1] == out
    assert run_command(capsys, *arguments, '--seed=1')[1] != out
    greedy_output = run_command(capsys, *arguments, '--temperature=0')[1]
    assert run_command(capsys, *arguments, '--top_k=1', '--temperature=3')[1] == greedy_output


@pytest.mark.slow
@pytest.mark.parametrize('option', ['--cache=4', '--cache=4+-1', '--cache=4+0', '--cache=0+3000000000', '--cash=4'])
@pytest.mark.parametrize('command', ['stream', 'sample'])
def test_stream_and_sample_reject_invalid_option_with_one_line(finished_run, text_path, capsys, command, option):
    input_option = f'--text={text_path}' if command == 'stream' else '--prompt=abc'
    assert option.rpartition('=')[2] in get_error_line(capsys, command, finished_run[0], input_option, option)


@pytest.mark.parametrize(
    'option',
    ['--tokens=0', '--temperature=-1', '--temperature=nan', '--top_k=301', '--top_k=0', '--seed=-1', '--prompt='],
)
def test_sample_rejects_invalid_option_with_one_line(finished_run, capsys, option):
    assert option.rpartition('=')[2] in get_error_line(capsys, 'sample', finished_run[0], '--prompt=abc', option)


def test_stream_rejects_invalid_run_or_text_with_one_line(finished_run, tmp_path, text_path, capsys):
    path, _ = finished_run
    text_option = f'--text={text_path}'
    assert str(tmp_path / 'none') in get_error_line(capsys, 'stream', tmp_path / 'none', text_option)
    assert f'{tmp_path} ' in get_error_line(capsys, 'stream', tmp_path, text_option)
    assert str(path) in get_error_line(capsys, 'stream', f'{path}@5', text_option)
    for text in (tmp_path / 'none', tmp_path):
        assert str(text) in get_error_line(capsys, 'stream', path, f'--text={text}')
    for content in (b'abc\xff', b''):
        text_path.write_bytes(content)
        get_error_line(capsys, 'stream', path, text_option)


@pytest.mark.slow
def test_stream_requires_tokenizer_of_training(finished_run, tmp_path, text_path, capsys):
    run_path = shutil.copytree(finished_run[0], tmp_path / 'run')
    tokenizer = json.loads((run_path / 'tokenizer.json').read_text())
    (run_path / 'tokenizer.json').write_text(json.dumps(tokenizer))
    line = get_error_line(capsys, 'stream', run_path, f'--text={text_path}')
    assert f'{run_path}/tokenizer.json' in line
    assert f'{run_path}@8' in line


EXCLUDED_BEGIN = exclude_from_loss(BEGIN)


@pytest.mark.parametrize(
    ('changes', 'ids', 'expected'),
    [
        (dict(), [5, 6], [5, 6]),
        (dict(data__bos='documents'), [5, 6], [EXCLUDED_BEGIN, 5, 6]),
        (dict(data__fixed_position=1), [5, 6], [EXCLUDED_BEGIN, 5, 6]),
        (dict(data__fixed_position=1), [], [EXCLUDED_BEGIN]),
        (dict(data__fixed_position=3), [5, 6], [5, 6, EXCLUDED_BEGIN]),
        (dict(data__fixed_position=2), [5, 6], [5, EXCLUDED_BEGIN, 6]),
        (dict(data__fixed_position=1), [BEGIN, 6], [BEGIN, 6]),
        (dict(data__bos='documents', data__fixed_position=1), [5, 6], [EXCLUDED_BEGIN, 5, 6]),
        (dict(data__bos='documents', data__fixed_position=2), [5, 6], [EXCLUDED_BEGIN, EXCLUDED_BEGIN, 5, 6]),
    ],
)
def test_add_training_tokens_matches_training_data(changes, ids, expected):
    assert add_training_tokens(np.array(ids, np.int32), make_tiny_spec(**changes).data).tolist() == expected


def test_add_training_tokens_rejects_text_shorter_than_fixed_position():
    with pytest.raises(UserError, match=r'\b4\b.*\b3\b'):
        add_training_tokens(np.array([5, 6]), make_tiny_spec(data__fixed_position=4).data)


@pytest.mark.slow
def test_stream_excludes_training_tokens_from_loss(finished_run, tmp_path, text_path, corpus, capsys):
    run_path = shutil.copytree(finished_run[0], tmp_path / 'run')
    config = json.loads((run_path / 'config.json').read_text())
    config['data']['fixed_position'] = 1
    (run_path / 'config.json').write_text(json.dumps(config))
    arguments = 'stream', run_path, f'--text={text_path}', '--cache=2+3', '--json'
    (fixed_result,), (bare_result,) = (
        json.loads(run_command(capsys, *arguments, *options)[1]) for options in ([], ['--bare'])
    )
    ids = encode_text(corpus)
    assert (fixed_result['predicted'], bare_result['predicted']) == (len(ids), len(ids) - 1)
    params = checkpointer.restore_parameters(run_path, RunDir(run_path).list_checkpoint_steps()[-1])
    logits_TV = streaming_reference.compute_logits(params, np.append([BEGIN], ids), make_spec(corpus), 2, 3)[:-1]
    assert fixed_result['perplexity'] == pytest.approx(
        streaming_reference.compute_perplexity(logits_TV, ids), rel=1e-4
    )


class ByteTokenizer:
    """Tokenizer whose ids are bytes."""

    def decode(self, ids):
        return bytes(ids).decode(errors='replace')


def test_decode_stream_yields_only_complete_characters():
    prefix_ids, following_ids = 'aé'.encode(), 'b→c'.encode()
    assert ''.join(sample.decode_stream(ByteTokenizer(), [*prefix_ids], [*following_ids])) == 'b→c'
    assert [*sample.decode_stream(ByteTokenizer(), [*prefix_ids], [*following_ids])][:4] == ['b', '→', 'c', '']
    assert ''.join(sample.decode_stream(ByteTokenizer(), [], [*'→'.encode()[:2]])) == '\N{REPLACEMENT CHARACTER}'


def test_default_cache_equals_training_window():
    assert [sample.get_default_cache(length) for length in (2048, 16, 4, 2)] == ['4+2043', '4+11', '2+1', '0+1']
