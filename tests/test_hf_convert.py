"""Tests of conversion between Hugging Face models and runs: logits, attention and parameters."""

import shutil

import jax
import numpy as np
import pytest
from commands import get_error_line, run_command
from tiny_runs import load_parameters as load_leaves
from tiny_runs import train_run
from tiny_specs import make_case_params, make_tiny_spec

from sinklab.checkpoint.checkpointer import restore_parameters
from sinklab.cli.main import main
from sinklab.config.differences import flatten_dict
from sinklab.data import tokenizer as tokenizer_module
from sinklab.data.sources import read_texts
from sinklab.errors import format_extra_command
from sinklab.hf import convert, files
from sinklab.run_dir import RunDir, read_spec

SKIP_REASON = f'transformers and torch are not installed: {format_extra_command("hf")}, where torch has a wheel'
torch = pytest.importorskip('torch', reason=SKIP_REASON)
transformers = pytest.importorskip('transformers', reason=SKIP_REASON)
safetensors_numpy = pytest.importorskip('safetensors.numpy', reason=SKIP_REASON)
pytestmark = pytest.mark.slow

BASE_CONFIG = dict(
    vocab_size=300,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=64,
    bos_token_id=1,
    eos_token_id=0,
)
LLAMA3 = dict(rope_type='llama3', rope_theta=500.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0)
GEMMA3 = dict(num_hidden_layers=7, num_key_value_heads=2, head_dim=16, query_pre_attn_scalar=16, sliding_window=5)
CASES = {
    'llama': ('Llama', {}),
    'llama, 2 kv heads': ('Llama', dict(num_key_value_heads=2)),
    'llama, 1 kv head, wide': ('Llama', dict(num_key_value_heads=1, head_dim=12)),
    'llama, tied': ('Llama', dict(tie_word_embeddings=True, rms_norm_eps=1e-3)),
    'llama, base': ('Llama', dict(rope_parameters=dict(rope_type='default', rope_theta=123.0))),
    'llama, linear': ('Llama', dict(rope_parameters=dict(rope_type='linear', rope_theta=1e4, factor=3.0))),
    'llama, llama3': (
        'Llama',
        dict(rope_parameters=LLAMA3 | dict(original_max_position_embeddings=32), num_key_value_heads=2),
    ),
    'mistral, window': ('Mistral', dict(num_key_value_heads=2, sliding_window=5)),
    'mistral': ('Mistral', dict(num_key_value_heads=2, sliding_window=None)),
    'qwen2': ('Qwen2', dict(num_key_value_heads=2, tie_word_embeddings=True)),
    'qwen3': ('Qwen3', dict(num_key_value_heads=2, head_dim=16)),
    'gemma3': ('Gemma3Text', GEMMA3),
    'gemma3, linear, untied': (
        'Gemma3Text',
        GEMMA3
        | dict(
            num_key_value_heads=1,
            tie_word_embeddings=False,
            rope_parameters={
                convert.FULL: dict(rope_type='linear', rope_theta=1e4, factor=8.0),
                convert.SLIDING: dict(rope_type='default', rope_theta=100.0),
            },
        ),
    ),
    'gemma3, wide window': ('Gemma3Text', GEMMA3 | dict(sliding_window=64)),
    'gemma3, local layers': ('Gemma3Text', GEMMA3 | dict(num_hidden_layers=3)),
}
IDS = np.random.default_rng(1).integers(0, 300, (2, 40)).astype(np.int32)
SIGMOID_FLAGS = ['--config.model.attention.similarity=sigmoid', '--config.model.attention.normalizer=none']
SHORT_RUN_FIELDS = {'optimizer.steps': 3, 'optimizer.warmup_steps': 1, 'optimizer.batch_size': 4, 'data.length': 16}
SHORT_RUN_FIELDS |= {
    'valid.windows': 6,
    'probe.sequences': 5,
    'probe.length': 12,
    'log.every_steps': 1,
    'model.dtype': 'float32',
}


@pytest.fixture(scope='module')
def tokenizer(corpus):
    """Return the text of a tokenizer.json with 300 ids, where id 0 ends documents."""
    return tokenizer_module.train_tokenizer(read_texts(corpus), 300)


def save_random_model(name, path, tokenizer, dtype=torch.float32):
    """Save a random model in a folder; each parameter affects the output."""
    class_prefix, changes = CASES[name]
    config = getattr(transformers, f'{class_prefix}Config')(**BASE_CONFIG | changes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation='eager')
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter_name, array in model.named_parameters():
            array.normal_(float('norm' in parameter_name), 0.2)
            if class_prefix == 'Gemma3Text' and 'norm' in parameter_name:
                array.copy_((1 + array) - 1)  # so that the gain, 1 + w, is exact in float32
    model.to(dtype).save_pretrained(path)
    (path / 'tokenizer.json').write_text(tokenizer)
    return load_model(path)


def load_model(path, dtype=torch.float32):
    return transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation='eager', dtype=dtype)


def compute_with_transformers(model):
    with torch.no_grad():
        outputs = model(torch.from_numpy(IDS.astype(np.int64)), output_attentions=True)
    assert len(outputs.attentions) == model.config.num_hidden_layers
    return outputs.logits.numpy(), np.stack([layer.numpy() for layer in outputs.attentions])


def compute_imported_with_sinklab(path):
    run_dir = RunDir(path)
    return convert.compute_with_sinklab(read_spec(run_dir).model, restore_parameters(path, 0), IDS)


def import_model(capsys, model_dir, out):
    code, _, err = run_command(capsys, 'checkpoint', 'import', f'hf:{model_dir}', f'--out={out}')
    assert code == 0, err
    return out


def read_arrays(path):
    return safetensors_numpy.load_file(path / files.MODEL_FILE)


def assert_close(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def assert_similarly_exact(actual, other_arrays, exact_arrays):
    """Assert that the float32 error of sinklab is at most three times that of transformers, both against float64.

    The difference of two float32 results would depend on the matrix products of the processor.
    """
    for array, other_array, exact_array in zip(actual, other_arrays, exact_arrays, strict=True):
        assert np.abs(array - exact_array).max() <= 3 * np.abs(other_array - exact_array).max()


# Each architecture, and each kind of rotary scaling.
SAMPLE = 'llama, 1 kv head, wide', 'llama, llama3', 'mistral, window', 'qwen2', 'qwen3', 'gemma3, linear, untied'


@pytest.mark.parametrize('name', make_case_params(CASES, SAMPLE))
def test_imported_model_matches_transformers_and_exports_bit_identical(name, tokenizer, tmp_path, capsys):
    model = save_random_model(name, tmp_path / 'theirs', tokenizer)
    run = import_model(capsys, tmp_path / 'theirs', tmp_path / 'run')
    expected = compute_with_transformers(model)
    assert expected[1].max() > 0.5, 'attention is flat'
    assert_similarly_exact(
        compute_imported_with_sinklab(run),
        expected,
        compute_with_transformers(load_model(tmp_path / 'theirs', torch.float64)),
    )
    assert run_command(capsys, 'checkpoint', 'verify', run)[0] == 0
    code, out, err = run_command(capsys, 'checkpoint', 'export', run, f'--out={tmp_path}/again')
    assert code == 0, err
    # Mistral without a window is a Llama model.
    model_type = 'llama' if name == 'mistral' else model.config.model_type
    assert out.startswith(f'{tmp_path}/again: {model_type}, ')
    assert (len(out.splitlines()), err) == (1, '')
    exported_model = load_model(tmp_path / 'again')
    assert_close(compute_with_transformers(exported_model), expected)
    imported_arrays, exported_arrays = read_arrays(tmp_path / 'theirs'), read_arrays(tmp_path / 'again')
    assert imported_arrays.keys() == exported_arrays.keys()
    for array_name, array in imported_arrays.items():
        np.testing.assert_array_equal(array, exported_arrays[array_name])
    configs = [files.read_json_object(tmp_path / folder / files.CONFIG_FILE) for folder in ('theirs', 'again')]
    assert convert.parse_hf_config(configs[0], 'theirs') == convert.parse_hf_config(configs[1], 'again')
    exported_tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / 'again')
    assert (
        exported_tokenizer('abc def')['input_ids']
        == tokenizer_module.parse_tokenizer(tokenizer, 'it').encode('abc def').ids
    )
    assert (exported_tokenizer.eos_token_id, exported_model.generation_config.eos_token_id) == (0, 0)


@pytest.mark.parametrize('name', make_case_params(['llama, 2 kv heads', 'gemma3'], ['gemma3']))
def test_import_and_export_support_bfloat16(name, tokenizer, tmp_path, capsys):
    save_random_model(name, tmp_path / 'theirs', tokenizer, torch.bfloat16)
    run = import_model(capsys, tmp_path / 'theirs', tmp_path / 'run')
    run = run.rename(tmp_path / 'moved')  # the tokenizer is in the folder
    arguments = 'export', f'{run}@0', f'--out={tmp_path}/again', '--dtype=bfloat16', '--length=9'
    code, _, err = run_command(capsys, 'checkpoint', *arguments)
    assert code == 0, err
    imported_arrays, exported_arrays = read_arrays(tmp_path / 'theirs'), read_arrays(tmp_path / 'again')
    assert {array.dtype for array in exported_arrays.values()} == {np.dtype('bfloat16')}
    for array_name, array in imported_arrays.items():
        np.testing.assert_array_equal(array, exported_arrays[array_name])
    assert files.read_json_object(tmp_path / 'again' / files.CONFIG_FILE)['max_position_embeddings'] == 9


@pytest.fixture(scope='module')
def run(corpus, tmp_path_factory):
    """Train a run with every feature that can be exported, and a document mask."""
    path = tmp_path_factory.mktemp('ours') / 'run'
    fields = dict(kv_heads=2, tied=True, qk_norm=True, mask__document=True, rotary__base=77.0)
    changes = {f'model__{name}': value for name, value in fields.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('SINKLAB_CACHE', str(path.parent / 'cache'))
        train_run(make_tiny_spec(data__source=corpus, **changes), path)
        yield path


def test_exported_run_matches_transformers_and_includes_tokenizer(run, tmp_path, capsys):
    code, out, err = run_command(capsys, 'checkpoint', 'export', run, f'--out={tmp_path}/out')
    assert code == 0, err
    assert 'qwen3' in out
    assert f'transformers {transformers.__version__}' in out
    model = load_model(tmp_path / 'out')
    expected = convert.compute_with_sinklab(read_spec(RunDir(run)).model, restore_parameters(run, 8), IDS)
    assert_close(expected, compute_with_transformers(model))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / 'out')
    ids = tokenizer('abc', return_tensors='pt')
    generated = model.generate(**ids, max_new_tokens=3, do_sample=False)
    assert tokenizer.decode(generated[0]).startswith('abc')
    imported_run = import_model(capsys, tmp_path / 'out', tmp_path / 'back')
    for a, b in zip(load_leaves(imported_run, 0), load_leaves(run, 8), strict=True):
        np.testing.assert_array_equal(a, b)


def test_export_with_different_results_leaves_no_files(run, tmp_path, capsys, monkeypatch):
    original = convert.ParameterSpec.convert_to_hf
    monkeypatch.setattr(convert.ParameterSpec, 'convert_to_hf', lambda leaf, array: original(leaf, array) * 1.001)
    get_error_line(capsys, 'checkpoint', 'export', run, f'--out={tmp_path}/out')
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize('name', make_case_params(['llama, 2 kv heads', 'gemma3'], ['gemma3']))
def test_imported_model_is_fine_tuned_with_another_attention_operation(name, corpus, tokenizer, tmp_path, capsys):
    save_random_model(name, tmp_path / 'theirs', tokenizer)
    overrides = [f'--config.{name}={value}' for name, value in (SHORT_RUN_FIELDS | {'data.source': corpus}).items()]
    command = ['train', '--compiled=none', f'--from=hf:{tmp_path}/theirs', f'--workdir={tmp_path}/run']
    command += [*overrides, *SIGMOID_FLAGS]
    code, err = main(command), capsys.readouterr().err
    assert code == 0, err
    run_dir = RunDir(tmp_path / 'run')
    assert run_dir.read_json('config')['model']['kv_heads'] == 2
    assert run_dir.read_json('config')['optimizer']['peak_learning_rate'] == 2e-5
    assert run_dir.read_parent()['row'] == 'theirs'
    assert run_dir.read_parent()['data'] == []
    assert any(
        change.startswith('model.attention.similarity exp -> sigmoid') for change in run_dir.read_parent()['config']
    )
    expected = flatten_dict(
        convert.convert_hf_arrays(read_spec(run_dir).model, load_model(tmp_path / 'theirs').state_dict())
    )
    actual = flatten_dict(restore_parameters(run_dir.path, 0))
    jax.tree.map(np.testing.assert_array_equal, actual, {name: expected[name] for name in actual})
    assert [record['step'] for record in run_dir.read_records()] == [0, 1, 2, 3]
    shutil.rmtree(tmp_path / 'theirs')
    assert main(command) == 0  # the run has all that it needs
