"""Tests of open models in GGUF files: conversion, each command that takes gguf:PATH, and files that are refused."""

import json
import os
from pathlib import Path

import jax
import numpy as np
import pytest
from commands import get_error_line

import sinklab
from sinklab.analysis.run_model import RunModel
from sinklab.checkpoint import checkpointer
from sinklab.cli import hf
from sinklab.cli.main import main
from sinklab.configs.open_models import MODELS
from sinklab.data import tokenizer as tokens
from sinklab.data.sources import read_texts
from sinklab.errors import UserError, format_extra_command
from sinklab.hf import convert, files, gguf
from sinklab.parallel import device_mesh
from sinklab.run_dir import RunDir, read_spec

SKIP_REASON = f'transformers, torch or gguf are not installed: {format_extra_command("hf")}, where torch has a wheel'
torch = pytest.importorskip('torch', reason=SKIP_REASON)
transformers = pytest.importorskip('transformers', reason=SKIP_REASON)
gguf_library = pytest.importorskip('gguf', reason=SKIP_REASON)
pytest.importorskip('accelerate', reason=SKIP_REASON)

ROOT = Path(__file__).parents[1]
IDS = np.random.default_rng(1).integers(0, 300, (2, 24))
# The width of a row is a multiple of 32, the block size of Q8_0.
COMMON_CONFIG = dict(
    vocab_size=300,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=128,
    bos_token_id=1,
    eos_token_id=0,
    tie_word_embeddings=True,
)
LINEAR_ROPE = dict(rope_type='linear', rope_theta=10000.0, factor=4.0)
CONFIGS = {
    'llama': lambda **changes: transformers.LlamaConfig(**COMMON_CONFIG | changes),
    # A GGUF file does not say which layers have a window: five of six.
    'gemma3': lambda **changes: transformers.Gemma3TextConfig(
        **COMMON_CONFIG | dict(num_hidden_layers=6) | changes, sliding_window=8
    ),
    'stablelm': lambda **changes: transformers.StableLmConfig(**COMMON_CONFIG | dict(use_qkv_bias=True) | changes),
}


def make_model(family, **changes):
    """Make a random model of transformers; each parameter affects the output."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[family](**changes), attn_implementation='eager')
    with torch.no_grad():
        for name, array in model.named_parameters():
            array.normal_(float('norm' in name), 0.2)
    return model.eval()


def interleave_rotary_halves(array, heads):
    """Order the rows of queries or keys as llama.cpp does for LLaMA: the two numbers of a rotated pair together."""
    return array.reshape(heads, 2, len(array) // heads // 2, -1).swapaxes(1, 2).reshape(array.shape)


def write_gguf(path, model, family, tokenizer=None, quantization='F32', architecture=None, fields=(), tensors=()):
    """Write a model of transformers as llama.cpp does; set its weights to the values that the file stores.

    Args:
        path: The file.
        model: The model.
        family: A key of CONFIGS.
        tokenizer: A byte-level tokenizer.json; None: the file has none.
        quantization: The type of matrices; vectors are F32.
        architecture: The architecture that the file names; None: the family.
        fields: More metadata, as pairs of a name after the architecture and a value; None: the field is left out.
        tensors: More tensors, as pairs of a name and a value.
    """
    config, architecture = model.config, architecture or family
    writer = gguf_library.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_vocab_size(config.vocab_size)
    if hasattr(config, 'rms_norm_eps'):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    else:
        writer.add_layer_norm_eps(config.layer_norm_eps)
    if family == 'gemma3':
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_sliding_window(config.sliding_window)
    for name, value in (list_rope_fields(config) | dict(fields)).items():
        if value is None:
            continue
        adders = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, list: writer.add_array}
        add = adders.get(type(value), writer.add_float32)
        add(f'{architecture}.{name}', value)
    if tokenizer:
        add_tokenizer(writer, json.loads(tokenizer)['model'])
        writer.add_add_bos_token(False)
    kind = gguf_library.GGMLQuantizationType[quantization]
    (architecture_id,) = (key for key, name in gguf_library.MODEL_ARCH_NAMES.items() if name == family)
    names = gguf_library.get_tensor_name_map(architecture_id, config.num_hidden_layers)
    with torch.no_grad():
        for hf_name, weight in model.named_parameters():
            gguf_name = names.get_name(hf_name, ('.weight', '.bias'))
            array, stored_kind = weight.numpy(), kind if weight.ndim > 1 else gguf_library.GGMLQuantizationType.F32
            heads = {'attn_q.': config.num_attention_heads, 'attn_k.': config.num_key_value_heads}
            for part, count in heads.items() if family == 'llama' else ():
                array = interleave_rotary_halves(array, count) if part in gguf_name else array
            if family == 'gemma3' and gguf_name.endswith('norm.weight'):
                array = array + 1
            data = gguf_library.quantize(np.ascontiguousarray(array), stored_kind)
            writer.add_tensor(gguf_name, data, raw_dtype=stored_kind)
            if quantization != 'F32':  # rounding is within rows, so that their order does not matter
                rounded = gguf_library.dequantize(
                    gguf_library.quantize(weight.numpy().copy(), stored_kind), stored_kind
                )
                weight.copy_(torch.from_numpy(rounded.copy()))
    for name, value in tensors:
        writer.add_tensor(name, np.array(value, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def list_rope_fields(config):
    """List the fields of rotary positions that llama.cpp writes."""
    rope = config.rope_parameters
    if 'full_attention' in rope:
        return {'rope.freq_base': rope['full_attention']['rope_theta']}
    head_width = getattr(config, 'head_dim', None) or config.hidden_size // config.num_attention_heads
    dimensions = int(head_width * rope.get('partial_rotary_factor', 1))
    return {'rope.freq_base': rope['rope_theta'], 'rope.dimension_count': dimensions}


def add_tokenizer(writer, bpe):
    names = sorted(bpe['vocab'], key=bpe['vocab'].get)
    token_types = gguf_library.TokenType.CONTROL, gguf_library.TokenType.NORMAL
    writer.add_tokenizer_model('gpt2')
    writer.add_tokenizer_pre('default')
    writer.add_token_list(names)
    writer.add_token_types([token_types[token_id > 1] for token_id in range(len(names))])
    writer.add_token_merges([pair if isinstance(pair, str) else ' '.join(pair) for pair in bpe['merges']])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_pad_token_id(0)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp('cache')
    monkeypatch.setenv('SINKLAB_CACHE', str(folder))
    return folder


@pytest.fixture(scope='module')
def tokenizer(corpus):
    return tokens.train_tokenizer(read_texts(corpus), 300)


@pytest.fixture
def llama(tmp_path, tokenizer):
    """Return (path of a GGUF file, its model in transformers)."""
    model = make_model('llama')
    return write_gguf(tmp_path / 'tiny.gguf', model, 'llama', tokenizer), model


def compute_logits(model):
    with torch.no_grad():
        return model(torch.as_tensor(IDS)).logits.numpy()


def load_converted(path):
    folder = gguf.convert_gguf(f'gguf:{path}')
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation='eager').eval()


@pytest.mark.parametrize('quantization', ['F32', 'Q8_0'])
@pytest.mark.parametrize('family', ['llama', 'gemma3'])
def test_converted_model_gives_same_logits(tmp_path, family, quantization):
    model = make_model(family)
    path = write_gguf(tmp_path / 'tiny.gguf', model, family, quantization=quantization)
    np.testing.assert_allclose(compute_logits(load_converted(path)), compute_logits(model), atol=2e-5)
    remarks = gguf.read_remarks(gguf.convert_gguf(f'gguf:{path}'))
    assert quantization in remarks[0]
    assert not any('parameters' in remark for remark in remarks)


def test_conversion_is_cached_until_file_changes(llama, capsys):
    path, _ = llama
    folder = gguf.convert_gguf(f'gguf:{path}')
    out, err = capsys.readouterr()
    assert (out, err.count('\n')) == ('', 1)
    assert f'gguf:{path}' in err
    assert gguf.convert_gguf(f'gguf:{path}') == folder
    assert capsys.readouterr() == ('', '')
    os.utime(path, (1, 1))
    assert gguf.convert_gguf(f'gguf:{path}') != folder


def make_gemma3_rope(full_attention, **sliding_attention):
    default = dict(rope_type='default', rope_theta=10_000.0)
    return dict(full_attention=default | full_attention, sliding_attention=default | sliding_attention)


LINEAR_FIELDS = {'rope.scaling.type': 'linear', 'rope.scaling.factor': 4.0}
ABSENT = {'rope.freq_base': None, 'rope.dimension_count': None}
# {name: (family, rotary positions of transformers, fields of the file)}.
ROTARY_CASES = {
    'base': ('llama', dict(rope_theta=999999.4), {}),
    'no base': ('llama', dict(rope_theta=10_000.0), ABSENT),
    'linear': ('llama', LINEAR_ROPE, LINEAR_FIELDS),
    'linear, older name': ('llama', LINEAR_ROPE, {'rope.scale_linear': 4.0}),
    'half of the dimensions': ('stablelm', dict(rope_theta=5000.0, partial_rotary_factor=0.5), {}),
    'all dimensions': ('stablelm', dict(rope_theta=10_000.0, partial_rotary_factor=1.0), ABSENT),
    'two bases': ('gemma3', make_gemma3_rope(dict(rope_theta=5e5), rope_theta=300.0), {'rope.freq_base_swa': 300.0}),
    'gemma3, linear in global layers': (
        'gemma3',
        make_gemma3_rope(LINEAR_ROPE | dict(rope_theta=1e6)),
        LINEAR_FIELDS,
    ),
}


@pytest.mark.parametrize('name', ROTARY_CASES)
def test_rotary_positions_are_those_of_the_file(tmp_path, name):
    family, rope, fields = ROTARY_CASES[name]
    rope = rope if family == 'gemma3' else dict(rope_type='default') | rope
    model = make_model(family, rope_parameters=rope)
    path = write_gguf(tmp_path / 'tiny.gguf', model, family, fields=fields.items())
    np.testing.assert_allclose(compute_logits(load_converted(path)), compute_logits(model), atol=2e-5)


@pytest.mark.exhaustive  # 62 layers take a minute
def test_gemma_27b_divides_scores_as_in_llama_cpp(tmp_path):
    changes = dict(num_hidden_layers=62, query_pre_attn_scalar=64 // 4, head_dim=32)
    model = make_model('gemma3', **changes)
    path = write_gguf(tmp_path / 'tiny.gguf', model, 'gemma3')
    np.testing.assert_allclose(compute_logits(load_converted(path)), compute_logits(model), atol=1e-4)


@pytest.mark.parametrize(
    'options',
    [
        dict(fields=[('rope.scaling.type', 'yarn')]),
        dict(fields=[('rope.scaling.type', 'linear')]),
        dict(tensors=[('rope_freqs.weight', np.ones(8))]),
        dict(tensors=[('rope_factors_long.weight', np.ones(8)), ('rope_factors_short.weight', np.ones(8))]),
        dict(architecture='mystery'),
    ],
    ids=('yarn', 'linear without a factor', 'llama3', 'longrope', 'architecture'),
)
def test_what_transformers_does_not_read_is_refused(tmp_path, options, cache):
    path = write_gguf(tmp_path / 'tiny.gguf', make_model('llama'), 'llama', **options)
    assert_conversion_error(f'gguf:{path}')
    assert not [*cache.glob('gguf/*')]


def test_tensors_that_transformers_drops_are_reported(tmp_path):
    bias = 'blk.0.attn_q.bias', np.ones(64)
    path = write_gguf(tmp_path / 'tiny.gguf', make_model('llama'), 'llama', tensors=[bias])
    assert any('may not be the same' in remark for remark in gguf.read_remarks(gguf.convert_gguf(f'gguf:{path}')))


def assert_conversion_error(model_ref):
    with pytest.raises(UserError) as error:
        gguf.convert_gguf(model_ref)
    assert model_ref in str(error.value)
    assert '\n' not in str(error.value)


@pytest.mark.parametrize('fraction', [0.001, 0.3, 0.95])
def test_truncated_file_is_refused(llama, fraction):
    path, _ = llama
    content = path.read_bytes()
    path.write_bytes(content[: int(fraction * len(content))])
    assert_conversion_error(f'gguf:{path}')


def test_file_that_is_no_model_is_refused(tmp_path):
    (tmp_path / 'other.gguf').write_bytes(b'PK\3\4' + bytes(100))
    for name in ('none.gguf', '', 'other.gguf'):
        assert_conversion_error(f'gguf:{tmp_path}/{name}')


def test_model_that_exceeds_memory_is_refused(llama, monkeypatch, capsys):
    path, model = llama
    folder = gguf.convert_gguf(f'gguf:{path}')
    num_parameters = sum(weight.numel() for weight in model.parameters())
    monkeypatch.setattr(device_mesh, 'get_available_memory_bytes', lambda: 4 * num_parameters - 1)
    os.utime(path, (1, 1))  # it has to be converted again
    capsys.readouterr()
    for name in f'hf:{folder}', f'gguf:{path}':
        assert name in get_error_line(capsys, 'measure', name)


def test_measure_of_gguf_file_equals_that_of_original_folder(llama, tokenizer, tmp_path, capsys, corpus):
    path, model = llama
    model.save_pretrained(tmp_path / 'original')
    (tmp_path / 'original' / 'tokenizer.json').write_text(tokenizer)
    options = ['--sequences=2', '--length=16', '--inputs=natural,random', f'--source={corpus}', '--json']
    reports = []
    for name in f'gguf:{path}', f'hf:{tmp_path}/original':
        assert main(['measure', name, *options]) == 0
        reports.append(json.loads(capsys.readouterr().out))
    assert reports[0]['model'] == f'gguf:{path}'
    assert 'GGUF (F32)' in reports[0]['remarks'][0]
    for kind, numbers in reports[1]['inputs'].items():
        assert reports[0]['inputs'][kind] == pytest.approx(numbers, rel=1e-4, abs=1e-5, nan_ok=True)


@pytest.mark.parametrize('adds_bos', [True, False])
def test_remark_says_if_transformers_and_llama_cpp_differ_in_bos(llama, monkeypatch, adds_bos):
    path, _ = llama  # its tokenizer in transformers does not add BOS
    reader, get_field = gguf.read_gguf(path, f'gguf:{path}'), gguf.get_field
    assert get_field(reader, 'tokenizer.ggml.add_bos_token') is False
    monkeypatch.setattr(
        gguf, 'get_field', lambda *args: adds_bos if args[1].endswith('add_bos_token') else get_field(*args)
    )
    remarks = gguf.read_remarks(gguf.convert_gguf(f'gguf:{path}'))
    assert any('BOS' in remark for remark in remarks) == adds_bos


@pytest.mark.slow
def test_import_of_gguf_file_keeps_logits_and_says_where_weights_come_from(llama, tmp_path, capsys):
    path, model = llama
    assert main(['checkpoint', 'import', f'gguf:{path}', f'--out={tmp_path}/run']) == 0
    out = capsys.readouterr().out
    assert f'gguf:{path}' in out
    assert 'GGUF (F32)' in out
    np.testing.assert_allclose(compute_imported_logits(tmp_path / 'run', IDS), compute_logits(model), atol=1e-4)
    row = RunDir(tmp_path / 'run').read_json('row')
    assert (row['source'], row['row']) == (f'gguf:{path}', 'tiny.gguf')
    assert RunModel(RunDir(tmp_path / 'run'), 0).remarks == row['remarks']


def compute_imported_logits(run_path, ids):
    params = jax.device_get(checkpointer.restore_parameters(run_path, 0))
    return convert.compute_with_sinklab(read_spec(RunDir(run_path)).model, params, ids.astype(np.int32))[0]


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['gguf', pytest.param('hf', marks=pytest.mark.exhaustive)])
def test_stream_and_sample_of_open_model_equal_those_of_imported_run(llama, tokenizer, kind, tmp_path, capsys):
    path, model = llama
    model.save_pretrained(tmp_path / 'original')
    (tmp_path / 'original' / 'tokenizer.json').write_text(tokenizer)
    model_ref = f'gguf:{path}' if kind == 'gguf' else f'hf:{tmp_path}/original'
    assert main(['checkpoint', 'import', model_ref, f'--out={tmp_path}/run']) == 0
    (tmp_path / 'book.txt').write_text('abc dab nop lmk ab efgh ponm a kl ' * 3)
    commands = (
        ['stream', f'--text={tmp_path}/book.txt', '--cache=0+8,4+4', '--json'],
        ['sample', '--prompt=abc', '--tokens=5', '--temperature=0'],
    )
    capsys.readouterr()
    for subcommand, *options in commands:
        outputs = []
        for name in model_ref, f'{tmp_path}/run':
            assert main([subcommand, name, *options]) == 0
            out, err = capsys.readouterr()
            assert ('GGUF (F32)' in err) == (kind == 'gguf')
            assert ('bfloat16' in err) == (subcommand == 'sample' and name == model_ref)
            outputs.append(out)
        if subcommand == 'stream':
            rows = [[row | dict(tokens_per_second=None) for row in json.loads(out)] for out in outputs]
            assert rows[0] == rows[1]
            assert (rows[0][0]['published'], rows[0][0]['dtype']) == (None, 'bfloat16')
        else:
            assert outputs[0] == outputs[1]
    assert main(['stream', model_ref, f'--text={tmp_path}/book.txt', '--cache=4+4']) == 0
    out, err = capsys.readouterr()
    assert 'bfloat16' in out
    assert f'{model_ref}, ' in out  # not the folder in the cache
    assert 'importing' not in err


@pytest.mark.slow
def test_gguf_file_is_imported_into_cache_once(llama, capsys):
    path, _ = llama
    run_dir = hf.get_cached_import(f'gguf:{path}')
    assert hf.get_cached_import(f'gguf:{path}').path == run_dir.path
    assert run_dir.list_checkpoint_steps() == [0]
    assert capsys.readouterr().err.count('importing') == 1


# Published models, which `make models` downloads.
SAMPLE_TEXT = 'The first token receives 42 % of the attention.\n\n    def sink(x): return x[0]  # naïve, 注意, ☃\n'
SMOLLM2, GEMMA, QWEN = (
    MODELS[name]['file'] for name in ('SmolLM2-135M-Instruct', 'gemma-3-270m', 'Qwen2.5-Coder-0.5B-Instruct')
)


def find_published_model(name):
    path = Path(os.environ.get('SINKLAB_TEST_MODELS') or ROOT / 'build' / 'models') / name
    if not path.is_file():
        pytest.skip(f'{path} is missing: make models downloads it, or SINKLAB_TEST_MODELS names its folder')
    return path


@pytest.fixture(scope='module')
def published_cache(tmp_path_factory):
    return tmp_path_factory.mktemp('published')


@pytest.fixture
def smollm2(published_cache, monkeypatch):
    monkeypatch.setenv('SINKLAB_CACHE', str(published_cache))
    return find_published_model(SMOLLM2)


@pytest.mark.slow
@pytest.mark.parametrize('name', [SMOLLM2, QWEN])
def test_chat_model_continues_text_about_france(smollm2, name, capsys):
    path = find_published_model(name)
    prompt = 'The capital of France is'
    assert main(['sample', f'gguf:{path}', f'--prompt={prompt}', '--tokens=8', '--temperature=0']) == 0
    assert 'Paris' in capsys.readouterr().out


@pytest.mark.slow
def test_smollm2_keeps_its_logits_through_import_and_export(smollm2, tmp_path, capsys):
    folder = gguf.convert_gguf(f'gguf:{smollm2}')
    assert main(['checkpoint', 'import', f'gguf:{smollm2}', f'--out={tmp_path}/run']) == 0
    assert 'Q4_1' in capsys.readouterr().out
    ids = np.array([sinklab.open(f'gguf:{smollm2}').subject.encode((ROOT / 'LICENSE').read_text())[:64]])
    expected, _ = convert.compute_with_transformers(files.load_model(folder, 'SmolLM2'), ids)
    # Float32 of transformers differs from its float64 by 1.0e-4, and its implementations of attention by 1.1e-4.
    tolerance = 1e-5 * np.abs(expected).max()
    np.testing.assert_allclose(compute_imported_logits(tmp_path / 'run', ids), expected, rtol=0, atol=tolerance)
    assert main(['checkpoint', 'export', f'{tmp_path}/run', f'--out={tmp_path}/exported']) == 0
    exported = files.load_model(tmp_path / 'exported', 'exported')
    np.testing.assert_allclose(convert.compute_with_transformers(exported, ids)[0], expected, atol=1e-5)


@pytest.mark.slow
def test_published_models_read_texts_with_tokenizer_of_their_files(smollm2):
    begins_with_bos = {}
    for path in map(find_published_model, (SMOLLM2, GEMMA, QWEN)):
        folder = gguf.convert_gguf(f'gguf:{path}')
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        original = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        ids = tokenizer(SAMPLE_TEXT)['input_ids']
        assert ids == original(SAMPLE_TEXT)['input_ids']
        assert not any('BOS' in remark for remark in gguf.read_remarks(folder))
        assert tokenizer.decode(ids, skip_special_tokens=True) == SAMPLE_TEXT
        begins_with_bos[path.name] = ids[0] == tokenizer.bos_token_id
    assert begins_with_bos == {SMOLLM2: False, GEMMA: True, QWEN: False}
