"""Tests of rejected imports and exports of Hugging Face models."""

import json
import math
import shutil

import numpy as np
import pytest
from conftest import make_tiny_spec
from tokenizers import processors

from sinklab.cli.main import main
from sinklab.data import tokenizer as tokenizer_module
from sinklab.errors import UserError, format_extra_command
from sinklab.hf import convert, files
from sinklab.run_dir import RunDir

pytest.importorskip('safetensors', reason=f'safetensors is not installed: {format_extra_command("hf")}')

CONFIG = dict(
    model_type='llama',
    vocab_size=300,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    bos_token_id=1,
    eos_token_id=0,
)
MISTRAL = CONFIG | dict(model_type='mistral', sliding_window=None)
GEMMA3 = dict(model_type='gemma3_text', head_dim=4, query_pre_attn_scalar=4, sliding_window=8)
LLAMA3_ROPE = dict(rope_type='llama3', factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0)


YARN = dict(rope_type='yarn', factor=4.0)
OLMO2 = dict(norm='res_post', qk_norm=True, qk_norm_joint=True)
GEMMA3_FIELDS = dict(norm='sandwich', qk_norm=True, ffn='geglu_tanh', scaled_embedding=True, tied=True)


def make_model_spec(**fields):
    return make_tiny_spec(**{f'model__{name}': value for name, value in fields.items()}).model


@pytest.fixture(scope='module')
def complete_model(tmp_path_factory):
    """Make a complete Hugging Face folder with two safetensors files."""
    path = tmp_path_factory.mktemp('theirs')
    model = make_model_spec(kv_heads=2)
    rng = np.random.default_rng(0)
    shapes = {
        hf_name: parameter.hf_shape
        for parameter in convert.list_parameters(model).values()
        for hf_name in parameter.hf_names
    }
    arrays = [(name, shape, lambda shape=shape: rng.normal(size=shape)) for name, shape in shapes.items()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, 'MAX_FILE_BYTES', 30_000)
        files.write_arrays(path, arrays, np.dtype(np.float32))
    assert len(list(path.glob('*.safetensors'))) == 2
    (path / 'tokenizer.json').write_text(tokenizer_module.train_tokenizer(['some words of text'], 300))
    files.write_json(path / files.CONFIG_FILE, CONFIG)
    return path


@pytest.fixture
def folder(complete_model, tmp_path):
    return shutil.copytree(complete_model, tmp_path / 'theirs')


def get_import_error(folder, capsys, model_ref=None):
    """Return the standard error of a rejected import."""
    out = folder.parent / 'out'
    code, err = main(['checkpoint', 'import', model_ref or f'hf:{folder}', f'--out={out}']), capsys.readouterr().err
    assert (code, len(err.splitlines())) == (1, 1), err
    assert not RunDir(out).has_run()
    return err


def change_json_file(folder, name, **changes):
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.slow
def test_import_reads_complete_folder_once_and_requires_params_origin(folder, tmp_path, capsys):
    assert main(['checkpoint', 'import', f'hf:{folder}', f'--out={tmp_path}/out']) == 0
    assert '--from=params:' in capsys.readouterr().out
    assert main(['checkpoint', 'import', f'hf:{folder}', f'--out={tmp_path}/out']) == 1
    assert f'--out={tmp_path}/out' in capsys.readouterr().err
    assert main(['train', f'--from={tmp_path}/out', f'--workdir={tmp_path}/run', '--compiled=none']) == 1
    assert 'checkpoints/0' in (err := capsys.readouterr().err)
    assert 'opt_state' in err
    assert f'--from={tmp_path}/out@0' in err
    assert '--from=params:' in err


def find_first_file(folder, pattern='*.safetensors'):
    return min(folder.glob(pattern))


DAMAGES = {
    'no folder': (lambda folder: shutil.rmtree(folder), ['hf:PATH', 'hf:ORG/NAME']),
    'no config': (lambda folder: (folder / 'config.json').unlink(), ['config.json']),
    'half a config': (lambda folder: (folder / 'config.json').write_text('{"model_'), ['config.json', '(char 1)']),
    'a config that is a list': (lambda folder: (folder / 'config.json').write_text('[]'), ['config.json']),
    'no tokenizer': (lambda folder: (folder / 'tokenizer.json').unlink(), ['tokenizer.json', 'AutoTokenizer']),
    'an empty tokenizer': (lambda folder: (folder / 'tokenizer.json').write_text('{}'), ['tokenizer.json']),
    'a missing weight file': (
        lambda folder: find_first_file(folder).unlink(),
        ['index.json', 'model-00001-of'],
    ),
    'half a file': (
        lambda folder: find_first_file(folder).write_bytes(find_first_file(folder).read_bytes()[:5000]),
        ['model-00001-of'],
    ),
    'an empty file': (lambda folder: find_first_file(folder).write_bytes(b''), ['model-00001-of']),
    'half of the arrays': (
        lambda folder: find_first_file(folder).rename(folder / files.MODEL_FILE),
        ['model.layers.0.mlp.up_proj.weight', '5'],
    ),
    'an index with a path outside the folder': (
        lambda folder: change_json_file(folder, files.INDEX_FILE, weight_map={'a': '../theirs/model.safetensors'}),
        ['model.safetensors.index.json', "'../theirs/model.safetensors'"],
    ),
    'an index whose weight map is a number': (
        lambda folder: change_json_file(folder, files.INDEX_FILE, weight_map=3),
        ['weight_map'],
    ),
}


@pytest.mark.parametrize('name', DAMAGES)
def test_import_rejects_damaged_folder(name, folder, capsys):
    damage, message_parts = DAMAGES[name]
    damage(folder)
    err = get_import_error(folder, capsys)
    assert all(part in err for part in message_parts), err


@pytest.mark.parametrize('name', ['pytorch_model.bin', 'model.pt', 'consolidated.00.pth'])
def test_import_rejects_unsafe_weight_file(name, folder, capsys):
    for file in folder.glob('*.safetensors*'):
        file.unlink()
    assert 'model.safetensors' in get_import_error(folder, capsys)
    (folder / name).write_bytes(b'cos\nsystem\n')
    assert name in (err := get_import_error(folder, capsys))
    assert 'pickle' in err


@pytest.mark.parametrize(
    ('changes', 'message_parts'),
    [
        (dict(vocab_size=200), ['tokenizer.json', '271', 'vocab_size', 'config.json', '200']),
        (dict(eos_token_id=None), ['config.json', 'eos_token_id']),
        (dict(eos_token_id=7), ['tokenizer.json', "'&'", '7', '0 <|endoftext|>']),
        (dict(hidden_size=32), ['embed_tokens.weight', '(300, 16)', 'config.json', '(300, 32)']),
        (dict(num_hidden_layers=3), ['model.layers.2.input_layernorm.weight', '8']),
        (dict(num_hidden_layers=1), ['model.layers.1.']),
        (dict(model_type='qwen3', head_dim=4), ['model.layers.0.self_attn.q_norm.weight', '3']),
        (dict(tie_word_embeddings='yes'), ['config.json', "'tied'", 'yes']),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_import_rejects_config_that_contradicts_arrays(changes, message_parts, folder, capsys):
    change_json_file(folder, 'config.json', **changes)
    err = get_import_error(folder, capsys)
    assert all(part in err for part in message_parts), err


def test_import_error_suggests_measure_only_for_unsupported_family(folder, capsys):
    change_json_file(folder, 'config.json', attention_bias=True)
    assert 'sinklab measure' not in get_import_error(folder, capsys)
    for model_type in 'gpt2', 'gemma2':
        change_json_file(folder, 'config.json', model_type=model_type)
        err = get_import_error(folder, capsys)
        assert all(part in err for part in (model_type, 'sinklab measure', f'hf:{folder}'))


@pytest.mark.parametrize('eos', [2, 299])
def test_import_says_where_to_set_end_token_that_is_not_special(folder, eos, capsys):
    change_json_file(folder, files.CONFIG_FILE, eos_token_id=eos)
    err = get_import_error(folder, capsys)
    assert all(part in err for part in (f'token {eos};', f'eos_token_id of {folder}/config.json', '0 <|endoftext|>'))


@pytest.mark.parametrize(('bos', 'expected'), [(1, (1, 'documents')), (0, (1, 'none')), (-1, (1, 'none'))])
def test_documents_begin_with_bos_only_if_tokenizer_adds_it(folder, bos, expected):
    change_json_file(folder, files.CONFIG_FILE, bos_token_id=bos)
    tokenizer = tokenizer_module.load_tokenizer(folder / 'tokenizer.json')
    name = tokenizer.id_to_token(max(bos, 0))
    tokenizer.post_processor = processors.TemplateProcessing(f'{name} $A', special_tokens=[(name, max(bos, 0))])
    tokenizer.save(str(folder / 'tokenizer.json'))
    fields = convert.make_config_fields(folder, folder)
    assert (fields['data.fixed_token'], fields['data.bos']) == expected


@pytest.mark.parametrize(
    'command', ['measure', 'evaluate --tasks=a', 'sample --prompt=a', 'checkpoint import --out=run']
)
@pytest.mark.parametrize('has_model', [True, False])
def test_folder_with_adapter_is_refused(folder, command, has_model, monkeypatch, capsys):
    monkeypatch.chdir(folder.parent)
    if not has_model:
        shutil.rmtree(folder)
        folder.mkdir()
    (folder / 'adapter_config.json').write_text('{"peft_type": "LORA", "base_model_name_or_path": "nobody/nothing"}')
    code = main([*command.split(), f'hf:{folder}'])
    out, err = capsys.readouterr()
    assert (code, out, err.count('\n')) == (1, '', 1)
    assert all(part in err for part in (str(folder), 'adapter_config.json', 'merge_and_unload', 'save_pretrained'))


def test_import_rejects_array_of_unsupported_dtype(folder, capsys):
    for file in folder.glob('*.safetensors*'):
        file.unlink()
    arrays = [('model.norm.weight', (16,), lambda: np.zeros(16))]
    files.write_arrays(folder, arrays, np.dtype(np.int8))
    assert 'model.norm.weight' in (err := get_import_error(folder, capsys))
    assert 'I8' in err
    assert 'F32, F16, BF16' in err


@pytest.mark.parametrize(
    ('changes', 'message_parts'),
    [
        (dict(model_type='gpt2'), ['model_type', "'gpt2'", 'qwen3']),
        (dict(model_type='qwen'), ["'qwen'", 'qwen3?']),
        (dict(hidden_act='gelu'), ['hidden_act', "'gelu'", "'silu'"]),
        (dict(attention_bias=True), ['attention_bias', 'True']),
        (dict(mlp_bias=True), ['mlp_bias', 'True']),
        (dict(partial_rotary_factor=0.5), ['partial_rotary_factor', '0.5']),
        (dict(quantization_config=dict(bits=4)), ['quantization_config', "{'bits': 4}"]),
        (dict(num_attention_heads='4'), ['num_attention_heads', "'4'"]),
        (dict(hidden_size=None), ['hidden_size', 'None']),
        (dict(rms_norm_eps=None), ['rms_norm_eps', 'None']),
        (dict(rope_scaling=dict(type='dynamic', factor=2.0)), ['rope_scaling', "'dynamic'", 'llama3']),
        (dict(rope_parameters=dict(rope_type='longrope')), ['rope_parameters', "'longrope'", 'llama3']),
        (dict(rope_parameters=dict(rope_type='yarn')), ['rope_parameters', 'yarn', 'factor']),
        (
            dict(rope_parameters=dict(rope_type='yarn', factor=2.0, truncate=False)),
            ['rope_parameters', 'truncate'],
        ),
        (dict(rope_scaling=dict(type='linear')), ['rope_scaling', 'linear', 'factor']),
        (dict(rope_parameters=dict(rope_theta=1e4, mrope_section=[1])), ['rope_parameters', 'mrope_section']),
        (dict(model_type='mistral', layer_types=['full_attention', 'sliding_attention']), ['sliding_window', '4096']),
        (
            dict(model_type='qwen2', use_sliding_window=True, sliding_window=8, max_window_layers=1),
            ['sliding_window', '8', '2n'],
        ),
        (dict(model_type='gpt_oss'), ["'gpt_oss'", 'experts']),
        (dict(model_type='gemma2'), ["'gemma2'", 'attn_logit_softcapping']),
        (dict(model_type='gemma3'), ["'gemma3'", 'images', 'gemma3_text']),
        (GEMMA3 | dict(attn_logit_softcapping=50.0), ['attn_logit_softcapping', '50.0']),
        (GEMMA3 | dict(final_logit_softcapping=30.0), ['final_logit_softcapping', '30.0']),
        (GEMMA3 | dict(use_bidirectional_attention=True), ['use_bidirectional_attention', 'True']),
        (
            GEMMA3 | dict(query_pre_attn_scalar=168),
            ['query_pre_attn_scalar', '168', 'head_dim, 4'],
        ),
        (
            GEMMA3 | dict(hidden_activation='gelu'),
            ['hidden_activation', "'gelu'", "'gelu_pytorch_tanh'"],
        ),
        (GEMMA3 | dict(sliding_window_pattern=0), ['sliding_window_pattern', '0']),
        (dict(layer_types=['full_attention']), ['layer_types', "['full_attention']", '2']),
        (dict(layer_types=['chunked_attention'] * 2), ['layer_types', "'chunked_attention'", 'full_attention']),
        (
            GEMMA3 | dict(num_hidden_layers=4, layer_types=['full_attention'] + 3 * ['sliding_attention']),
            ['sliding_window', '8', '2n'],
        ),
        (
            GEMMA3 | dict(num_hidden_layers=4, layer_types=2 * ['sliding_attention'] + 2 * ['full_attention']),
            ['sliding_window', '8', '2n'],
        ),
        (
            dict(model_type='smollm3', num_hidden_layers=4, no_rope_layers=[1, 0, 0, 1]),
            ['rotary positions', '2n'],
        ),
        (dict(model_type='smollm3', no_rope_layers=[0, 0]), ['rotary positions', '2n']),
        (
            dict(model_type='smollm3', num_hidden_layers=4, use_sliding_window=True, sliding_window=8),
            ['sliding_window', '8', '2n'],
        ),
        (dict(model_type='smollm3', no_rope_layers=[1]), ['no_rope_layers', '[1]', '2']),
    ],
)
def test_parse_hf_config_rejects_unsupported_field_values(changes, message_parts):
    with pytest.raises(UserError) as exc_info:
        convert.parse_hf_config(CONFIG | changes, 'config.json')
    assert all(part in str(exc_info.value) for part in message_parts)
    assert '\n' not in str(exc_info.value)


@pytest.mark.parametrize(
    ('hf_config', 'expected'),
    [
        (CONFIG, dict(kv_heads=2, head_width=4, **{'rotary.base': 10_000.0, 'rotary.scaling': 'none'})),
        (CONFIG | dict(num_key_value_heads=None), dict(kv_heads=None)),
        (CONFIG | dict(rope_theta=5e5), {'rotary.base': 5e5}),
        (
            CONFIG | dict(rope_theta=5e5, rope_parameters=dict(rope_type='default', rope_theta=7)),
            {'rotary.base': 7.0},
        ),
        (CONFIG | dict(rope_theta=9.0, rope_scaling=dict(type='linear', factor=2)), {'rotary.factor': 2.0}),
        (CONFIG | dict(rope_scaling=LLAMA3_ROPE), {'rotary.slow': 1.0, 'rotary.fast': 4.0, 'rotary.length': 64}),
        (CONFIG | dict(rope_scaling=LLAMA3_ROPE | dict(original_max_position_embeddings=8)), {'rotary.length': 8}),
        (MISTRAL | dict(sliding_window=8), {'mask.window': 8}),
        (MISTRAL | dict(sliding_window=64), {'mask.window': None}),
        (MISTRAL, {'mask.window': None}),
        (CONFIG | dict(sliding_window=8), {'mask.window': None}),
        (
            CONFIG | dict(rope_scaling=YARN, num_attention_heads=2),
            {'rotary.slow': 1.0, 'rotary.fast': 32.0, 'rotary.attention_factor': 0.1 * math.log(4) + 1},
        ),
        (
            CONFIG
            | dict(rope_scaling=YARN | dict(mscale=1.0, mscale_all_dim=1.0, original_max_position_embeddings=8)),
            {'rotary.attention_factor': 1.0, 'rotary.length': 8},
        ),
        (
            CONFIG | GEMMA3 | dict(num_hidden_layers=7, rope_local_base_freq=9.0, rope_theta=7.0),
            {'mask.window': 8, 'global_layers.every': 6, 'rotary.base': 9.0, 'global_layers.rotary.base': 7.0},
        ),
        (
            CONFIG
            | GEMMA3
            | dict(num_hidden_layers=4, sliding_window_pattern=2, rope_scaling=dict(type='linear', factor=8)),
            {'global_layers.every': 2, 'global_layers.rotary.factor': 8.0, 'rotary.scaling': 'none'},
        ),
        (CONFIG | GEMMA3, {'mask.window': 8, 'rotary.base': 1e4, 'norm': 'sandwich', 'scaled_embedding': True}),
        (
            CONFIG | dict(model_type='smollm3', num_hidden_layers=8),
            {'global_layers.every': 4, 'global_layers.position': 'none', 'rotary.base': 2e6},
        ),
        (
            CONFIG | dict(model_type='olmo3', num_hidden_layers=4, sliding_window=8, rope_scaling=YARN),
            {
                'global_layers.every': 4,
                'global_layers.rotary.scaling': 'yarn',
                'rotary.scaling': 'none',
                'rotary.base': 5e5,
            },
        ),
        (
            CONFIG | dict(model_type='qwen3', sliding_window=8),
            {'mask.window': None, 'qk_norm': True, 'head_width': 128},
        ),
    ],
    ids=str,
)
def test_parse_hf_config_reads_fields_like_transformers(hf_config, expected):
    fields = convert.parse_hf_config(hf_config, 'config.json')
    assert {name: fields[f'model.{name}'] for name in expected} == expected


def test_parse_hf_config_limits_data_length_above_attention_window():
    fields = convert.parse_hf_config(
        MISTRAL | dict(sliding_window=4096, max_position_embeddings=32768), 'config.json'
    )
    assert (fields['model.mask.window'], fields['data.length']) == (4096, 8192)
    assert convert.parse_hf_config(CONFIG | dict(max_position_embeddings=8192), 'config.json')['data.length'] == 2048


@pytest.mark.parametrize('name', [*convert.EXPORTABLE_VALUES, 'ffn', 'norm', 'scaled_embedding'])
def test_make_hf_config_rejects_fields_without_transformers_equivalent(name):
    unsupported_values = {
        **{'position': 'alibi', 'ffn': 'gelu', 'norm': 'post', 'head_norm': True, 'combination': 'add'},
        'scaled_embedding': True,
        **{'gate': 'value', 'attention.gain': 2.0, 'mask.prefix': 3, 'mask.block': 5, 'columns.kind': 'kv'},
        **{'attention.similarity': 'softpick', 'attention.normalizer': 'plus_one', 'attention.feature_map': 'elu1'},
    }
    with pytest.raises(UserError, match=rf'^config\.model\.{name} .*{unsupported_values[name]}'):
        convert.make_hf_config(make_model_spec(**{name.replace('.', '__'): unsupported_values[name]}), 16)


@pytest.mark.parametrize(
    ('fields', 'model_type'),
    [
        ({}, 'llama'),
        (dict(tied=True, kv_heads=2), 'llama'),
        (dict(mask__window=4), 'mistral'),
        (dict(width=18), 'mistral'),
        (dict(qkv_bias=True, mask__window=4), 'qwen2'),
        (dict(qk_norm=True), 'qwen3'),
        (dict(rotary__base=3.0, rotary__scaling='linear', rotary__factor=2.0), 'llama'),
        (dict(qk_norm=True, mask__window=4, layers=4, global_layers__every=2), 'qwen3'),
        (dict(layers=4, global_layers__every=2, global_layers__position='none'), 'smollm3'),
        (dict(mask__window=4, layers=4, global_layers__every=2, global_layers__position='none'), 'smollm3'),
        (OLMO2, 'olmo2'),
        (OLMO2 | dict(mask__window=4), 'olmo3'),
        (OLMO2 | dict(mask__window=4, layers=5, global_layers__every=2, global_layers__rotary__base=7.0), 'olmo3'),
        (GEMMA3_FIELDS, 'gemma3_text'),
        (GEMMA3_FIELDS | dict(mask__window=4, layers=7, global_layers__every=6), 'gemma3_text'),
        (GEMMA3_FIELDS | dict(layers=5, global_layers__every=2, global_layers__rotary__base=7.0), 'gemma3_text'),
    ],
    ids=str,
)
def test_make_hf_config_round_trips_through_parse_hf_config(fields, model_type):
    model = make_model_spec(**fields)
    hf_config = convert.make_hf_config(model, 16)
    assert hf_config['model_type'] == model_type
    spec = make_tiny_spec(**{f'model__{name}': value for name, value in fields.items()})
    for name, value in convert.parse_hf_config(hf_config, 'config.json').items():
        part, _, field = name.partition('.')
        assert convert.get_field(getattr(spec, part), field) == value, name


@pytest.mark.parametrize(
    ('fields', 'message_parts'),
    [
        (dict(norm='res_post'), ['qk_norm', 'False', 'norm=res_post']),
        (dict(norm='sandwich'), ['ffn', 'swiglu', 'norm=sandwich']),
        (
            OLMO2 | dict(layers=2, global_layers__every=2, global_layers__position='none'),
            ['global_layers.every', '2'],
        ),
        (dict(layers=2, mask__window=4, global_layers__every=2), ['global_layers.every', '2']),
    ],
    ids=str,
)
def test_make_hf_config_names_field_that_no_model_type_combines(fields, message_parts):
    with pytest.raises(UserError) as exc_info:
        convert.make_hf_config(make_model_spec(**fields), 16)
    assert all(part in str(exc_info.value) for part in message_parts)


def test_make_hf_config_rejects_qkv_bias_with_qk_norm():
    with pytest.raises(UserError, match=r'qkv_bias.*qk_norm'):
        convert.make_hf_config(make_model_spec(qkv_bias=True, qk_norm=True), 16)


def test_train_from_missing_hf_folder_writes_no_run(tmp_path, capsys):
    code = main(['train', f'--from=hf:{tmp_path}/nothing', f'--workdir={tmp_path}/run'])
    err = capsys.readouterr().err
    assert (code, len(err.splitlines())) == (1, 1)
    assert f'{tmp_path}/nothing' in err
    assert not (tmp_path / 'run').exists()


def test_import_downloads_no_pickle_patterns(tmp_path, monkeypatch, capsys):
    requests = []

    class FakeHub:
        @staticmethod
        def snapshot_download(name, allow_patterns):
            requests.append((name, allow_patterns))
            raise OSError('no network\nat all')

    monkeypatch.setattr(files, 'import_hf_library', lambda name: FakeHub)
    err = get_import_error(tmp_path / 'theirs', capsys, 'hf:org/name')
    assert 'hf:org/name' in err
    assert 'OSError: no network at all' in err
    assert requests == [('org/name', ['*.safetensors', '*.json', '*.jinja', '*.txt', 'tokenizer.model'])]


def make_hub_snapshot(folder, repository):
    """Make a snapshot folder like that of the Hugging Face hub cache, with symlinks to blobs."""
    blobs, snapshot = repository / 'blobs', repository / 'snapshots' / 'main'
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(folder.iterdir())):
        file.rename(blobs / f'{number:040}')
        (snapshot / file.name).symlink_to(f'../../blobs/{number:040}')
    return snapshot


@pytest.mark.slow
def test_import_follows_symlinks_of_hub_cache(folder, tmp_path):
    (folder / 'chat_template.jinja').write_text('{{ messages }}')
    snapshot = make_hub_snapshot(folder, tmp_path / 'models--org--theirs')
    assert main(['checkpoint', 'import', f'hf:{snapshot}', f'--out={tmp_path}/out']) == 0
    copied = tmp_path / 'out' / 'chat_template.jinja'
    assert copied.read_text() == '{{ messages }}'
    assert not copied.is_symlink()


@pytest.mark.slow
def test_import_from_hub_names_row_after_model(folder, tmp_path, monkeypatch):
    snapshot = make_hub_snapshot(folder, tmp_path / 'models--org--theirs')
    monkeypatch.setattr(files, 'fetch_model_dir', lambda model_ref: snapshot)
    assert main(['checkpoint', 'import', 'hf:org/theirs', f'--out={tmp_path}/out']) == 0
    assert RunDir(tmp_path / 'out').read_json('row')['row'] == 'theirs'
