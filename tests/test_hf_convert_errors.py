"""Tests of rejected imports and exports of Hugging Face models."""

import dataclasses
import json
import shutil

import pytest
from commands import get_error_line
from tiny_specs import make_tiny_spec
from tokenizers import processors

from sinklab.cli.main import main
from sinklab.config.differences import flatten_dict
from sinklab.data import tokenizer as tokenizer_module
from sinklab.errors import UserError, format_extra_command
from sinklab.hf import convert, files
from sinklab.run_dir import RunDir

SKIP_REASON = f'transformers or torch is not installed: {format_extra_command("hf")}'
transformers = pytest.importorskip('transformers', reason=SKIP_REASON)
pytest.importorskip('torch', reason=SKIP_REASON)

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
GEMMA3_FIELDS = dict(norm='sandwich', qk_norm=True, ffn='geglu_tanh', scaled_embedding=True, tied=True)


def make_model_spec(**fields):
    return make_tiny_spec(**{f'model__{name}': value for name, value in fields.items()}).model


@pytest.fixture(scope='module')
def complete_model(tmp_path_factory):
    """Make a complete Hugging Face folder with two safetensors files."""
    path = tmp_path_factory.mktemp('theirs')
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**CONFIG))
    model.save_pretrained(path, max_shard_size='30KB')
    assert (path / files.INDEX_FILE).exists()
    (path / 'tokenizer.json').write_text(tokenizer_module.train_tokenizer(['some words of text'], 300))
    files.write_json(path / files.CONFIG_FILE, CONFIG)
    return path


@pytest.fixture
def folder(complete_model, tmp_path):
    return shutil.copytree(complete_model, tmp_path / 'theirs')


def get_import_error(folder, capsys, model_ref=None):
    """Return the line of error of a rejected import."""
    out = folder.parent / 'out'
    line = get_error_line(capsys, 'checkpoint', 'import', model_ref or f'hf:{folder}', f'--out={out}')
    assert not RunDir(out).has_run()
    return line


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
    'no folder': shutil.rmtree,
    'no config': lambda folder: (folder / 'config.json').unlink(),
    'half a config': lambda folder: (folder / 'config.json').write_text('{"model_'),
    'no tokenizer': lambda folder: (folder / 'tokenizer.json').unlink(),
    'a missing weight file': lambda folder: find_first_file(folder).unlink(),
    'half a file': lambda folder: find_first_file(folder).write_bytes(find_first_file(folder).read_bytes()[:5000]),
    'an index with a path outside the folder': lambda folder: change_json_file(
        folder, files.INDEX_FILE, weight_map={'a': '../theirs/model.safetensors'}
    ),
    'an index whose weight map is a number': lambda folder: change_json_file(folder, files.INDEX_FILE, weight_map=3),
    'ids beyond the vocabulary': lambda folder: change_json_file(folder, 'config.json', vocab_size=200),
    'no end token': lambda folder: change_json_file(folder, 'config.json', eos_token_id=None),
    'an end token that is text': lambda folder: change_json_file(folder, 'config.json', eos_token_id=7),
    'another width': lambda folder: change_json_file(folder, 'config.json', hidden_size=32),
    'more layers': lambda folder: change_json_file(folder, 'config.json', num_hidden_layers=3),
    'fewer layers': lambda folder: change_json_file(folder, 'config.json', num_hidden_layers=1),
}


@pytest.mark.parametrize('name', DAMAGES)
def test_import_rejects_damaged_folder(name, folder, capsys):
    DAMAGES[name](folder)
    assert str(folder) in get_import_error(folder, capsys)


def test_import_rejects_pickle(folder, capsys):
    for file in folder.glob('*.safetensors*'):
        file.unlink()
    (folder / 'pytorch_model.bin').write_bytes(b'cos\nsystem\n')
    assert 'pytorch_model.bin' in get_import_error(folder, capsys)


@pytest.mark.parametrize(('bos', 'expected'), [(1, (1, 'documents')), (0, (1, 'none')), (-1, (1, 'none'))])
def test_documents_begin_with_bos_only_if_tokenizer_adds_it(folder, bos, expected):
    change_json_file(folder, files.CONFIG_FILE, bos_token_id=bos)
    tokenizer = tokenizer_module.load_tokenizer(folder / 'tokenizer.json')
    name = tokenizer.id_to_token(max(bos, 0))
    tokenizer.post_processor = processors.TemplateProcessing(f'{name} $A', special_tokens=[(name, max(bos, 0))])
    tokenizer.save(str(folder / 'tokenizer.json'))
    fields = convert.make_config_fields(folder, folder)
    assert (fields['data.fixed_token'], fields['data.bos']) == expected


@pytest.mark.parametrize('command', ['measure', 'checkpoint import --out=run'])
def test_folder_with_adapter_is_refused(folder, command, monkeypatch, capsys):
    monkeypatch.chdir(folder.parent)
    (folder / 'adapter_config.json').write_text('{"peft_type": "LORA", "base_model_name_or_path": "nobody/nothing"}')
    line = get_error_line(capsys, *command.split(), f'hf:{folder}')
    assert all(part in line for part in (str(folder), 'adapter_config.json'))


@pytest.mark.parametrize(
    ('changes', 'field'),
    [
        (dict(model_type='gpt2'), 'model_type'),
        (dict(hidden_act='gelu'), 'hidden_act'),
        (dict(attention_bias=True), 'attention_bias'),
        (dict(partial_rotary_factor=0.5), 'partial_rotary_factor'),
        (dict(quantization_config=dict(bits=4)), 'quantization_config'),
        (dict(num_hidden_layers=0), 'num_hidden_layers'),
        (dict(hidden_size=None), 'hidden_size'),
        (dict(rope_scaling=dict(type='dynamic', factor=2.0)), 'dynamic'),
        (dict(rope_scaling=dict(type='linear')), 'factor'),
        (dict(rope_parameters=dict(rope_theta=1e4, mrope_section=[1])), 'mrope_section'),
        (dict(model_type='mistral', layer_types=['full_attention', 'sliding_attention']), 'sliding_window'),
        (dict(model_type='qwen2', use_sliding_window=True, sliding_window=8, max_window_layers=1), 'sliding_window'),
        (GEMMA3 | dict(final_logit_softcapping=30.0), 'final_logit_softcapping'),
        (GEMMA3 | dict(query_pre_attn_scalar=168), 'query_pre_attn_scalar'),
        (GEMMA3 | dict(hidden_activation='gelu'), 'hidden_activation'),
        (
            GEMMA3 | dict(num_hidden_layers=4, layer_types=['full_attention'] + 3 * ['sliding_attention']),
            'sliding_window',
        ),
        (
            GEMMA3 | dict(num_hidden_layers=4, layer_types=2 * ['sliding_attention'] + 2 * ['full_attention']),
            'sliding_window',
        ),
    ],
)
def test_parse_hf_config_rejects_unsupported_field_values(changes, field):
    with pytest.raises(UserError) as error:
        convert.parse_hf_config(CONFIG | changes, 'config.json')
    assert field in str(error.value)
    assert '\n' not in str(error.value)


@pytest.mark.parametrize(
    ('hf_config', 'expected'),
    [
        (CONFIG, dict(kv_heads=2, head_width=4, **{'rotary.base': 10_000.0, 'rotary.scaling': 'none'})),
        (CONFIG | dict(rope_theta=5e5), {'rotary.base': 5e5}),
        (
            CONFIG | dict(rope_theta=5e5, rope_parameters=dict(rope_type='default', rope_theta=7)),
            {'rotary.base': 7.0},
        ),
        (CONFIG | dict(rope_theta=9.0, rope_scaling=dict(type='linear', factor=2)), {'rotary.factor': 2.0}),
        (CONFIG | dict(rope_scaling=LLAMA3_ROPE), {'rotary.slow': 1.0, 'rotary.fast': 4.0, 'rotary.length': 64}),
        (MISTRAL | dict(sliding_window=8), {'mask.window': 8}),
        (MISTRAL | dict(sliding_window=64), {'mask.window': None}),
        (
            CONFIG | GEMMA3 | dict(num_hidden_layers=7, rope_local_base_freq=9.0, rope_theta=7.0),
            {'mask.window': 8, 'global_layers.every': 6, 'rotary.base': 9.0, 'global_layers.rotary.base': 7.0},
        ),
        (
            CONFIG
            | GEMMA3
            | dict(num_hidden_layers=4, sliding_window_pattern=2, rope_scaling=dict(rope_type='linear', factor=8)),
            {'global_layers.every': 2, 'global_layers.rotary.factor': 8.0, 'rotary.scaling': 'none'},
        ),
        (CONFIG | GEMMA3, {'mask.window': 8, 'rotary.base': 1e4, 'norm': 'sandwich', 'scaled_embedding': True}),
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


UNSUPPORTED_VALUES = {
    **{'position': 'alibi', 'ffn': 'gelu', 'norm': 'post', 'head_norm': True, 'combination': 'add'},
    **{'gate': 'value', 'attention.gain': 2.0, 'mask.prefix': 3, 'mask.block': 5, 'learned_kv.kind': 'kv'},
    **{'attention.similarity': 'softpick', 'attention.normalizer': 'plus_one', 'attention.feature_map': 'elu1'},
    **{'norm_kind': 'gated_rms', 'value_residual': True, 'exclusive': 'fixed', 'forget_gate': True},
    **{'attention.gamma': -0.1, 'attention.zeta': 2.0},
    'scaled_embedding': True,
}


@pytest.mark.parametrize('name', UNSUPPORTED_VALUES)
def test_export_refuses_fields_without_transformers_equivalent_by_name(name):
    with pytest.raises(UserError) as error:
        convert.make_hf_config(make_model_spec(**{name.replace('.', '__'): UNSUPPORTED_VALUES[name]}), 16)
    assert f'config.model.{name}=' in str(error.value)


@pytest.mark.parametrize(
    ('fields', 'model_type'),
    [
        ({}, 'llama'),
        (dict(tied=True, kv_heads=2), 'llama'),
        (dict(mask__window=4), 'mistral'),
        (dict(qkv_bias=True), 'qwen2'),
        (dict(qk_norm=True), 'qwen3'),
        (dict(rotary__base=3.0, rotary__scaling='linear', rotary__factor=2.0), 'llama'),
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
        assert flatten_dict(dataclasses.asdict(getattr(spec, part)))[field] == value, name


@pytest.mark.parametrize(
    'fields',
    [
        dict(norm='res_post'),
        dict(norm='sandwich'),
        dict(qkv_bias=True, qk_norm=True),
        dict(qk_norm=True, mask__window=4),
        dict(layers=2, mask__window=4, global_layers__every=2),
        dict(qk_norm=True, layers=2, mask__window=4, global_layers__every=2, global_layers__position='none'),
    ],
    ids=str,
)
def test_make_hf_config_rejects_fields_that_no_model_type_combines(fields):
    with pytest.raises(UserError):
        convert.make_hf_config(make_model_spec(**fields), 16)


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
