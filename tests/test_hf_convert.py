"""Tests of conversion between Hugging Face models and runs: logits, attention and parameters."""

import json

import jax
import numpy as np
import pytest
from conftest import some, tiny
from runs import parameters as leaves
from runs import train

from sinklab.checkpoint.checkpointer import restore_parameters
from sinklab.cli.main import main
from sinklab.data import tokenizer as tokens
from sinklab.data.sources import read_texts
from sinklab.hf import convert, files
from sinklab.hf import convert as convert_module
from sinklab.install_commands import format_extra_command
from sinklab.run_dir import RunDir, flatten_dict, read_spec

WORDS = f'transformers and torch are not installed: {format_extra_command("hf")}, where torch has a wheel'
torch = pytest.importorskip('torch', reason=WORDS)
transformers = pytest.importorskip('transformers', reason=WORDS)
pytestmark = pytest.mark.slow

SIZE = dict(
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
    'qwen2, window': ('Qwen2', dict(use_sliding_window=True, sliding_window=5, max_window_layers=0)),
    'qwen3': ('Qwen3', dict(num_key_value_heads=2, head_dim=16)),
}
IDS = np.random.default_rng(1).integers(0, 300, (2, 40)).astype(np.int32)


@pytest.fixture(scope='module')
def tokenizer(corpus):
    """Make the text of a tokenizer.json of 300 ids; id 0 ends documents."""
    return tokens.train_tokenizer(read_texts(corpus), 300)


def made(name, path, tokenizer, dtype=torch.float32):
    """Save a random model in a folder; each parameter affects the output."""
    kind, changes = CASES[name]
    given = getattr(transformers, f'{kind}Config')(**SIZE | changes)
    model = transformers.AutoModelForCausalLM.from_config(given, attn_implementation='eager')
    torch.manual_seed(0)
    with torch.no_grad():
        for part, array in model.named_parameters():
            array.normal_(float('norm' in part), 0.2)
    model.to(dtype).save_pretrained(path)
    (path / 'tokenizer.json').write_text(tokenizer)
    return loaded(path)


def loaded(path, dtype=torch.float32):
    return transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation='eager', dtype=dtype)


def of_theirs(model):
    with torch.no_grad():
        found = model(torch.from_numpy(IDS.astype(np.int64)), output_attentions=True)
    assert len(found.attentions) == model.config.num_hidden_layers
    return found.logits.numpy(), np.stack([layer.numpy() for layer in found.attentions])


def of_ours(path):
    folder = RunDir(path)
    return convert_module.compute_with_sinklab(read_spec(folder).model, restore_parameters(path, 0), IDS)


def said(capsys, *arguments):
    code = main(['checkpoint', *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def brought(capsys, given, out):
    code, _, err = said(capsys, 'import', f'hf:{given}', f'--out={out}')
    assert code == 0, err
    return out


def arrays(path):
    found = files.SafetensorsReader(path)
    return {name: found.read_array(name) for name in found.shapes}


def assert_close(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def assert_as_exact(ours, theirs, exact):
    """Assert that the float32 error of sinklab is at most three times that of transformers, both against float64.

    The difference of two float32 results would depend on the matrix products of the processor.
    """
    for one, other, reference in zip(ours, theirs, exact, strict=True):
        assert np.abs(one - reference).max() <= 3 * np.abs(other - reference).max()


# Each architecture, with and without grouped keys, and each kind of rotary scaling.
SAMPLED = 'llama', 'llama, 1 kv head, wide', 'llama, linear', 'llama, llama3', 'mistral, window', 'qwen2', 'qwen3'


@pytest.mark.parametrize('name', some(CASES, SAMPLED))
def test_imported_model_matches_transformers_and_exports_bit_identical(name, tokenizer, tmp_path, capsys):
    model = made(name, tmp_path / 'theirs', tokenizer)
    run = brought(capsys, tmp_path / 'theirs', tmp_path / 'run')
    theirs = of_theirs(model)
    assert theirs[1].max() > 0.5, 'attention is flat'
    assert_as_exact(of_ours(run), theirs, of_theirs(loaded(tmp_path / 'theirs', torch.float64)))
    assert said(capsys, 'verify', run)[0] == 0
    code, out, err = said(capsys, 'export', run, f'--out={tmp_path}/again')
    assert code == 0, err
    kind = 'llama' if name == 'mistral' else model.config.model_type  # Mistral without a window is a Llama model
    assert out.startswith(f'{tmp_path}/again: {kind}, ')
    assert (len(out.splitlines()), err) == (1, '')
    again = loaded(tmp_path / 'again')
    assert_close(of_theirs(again), theirs)
    before, after = arrays(tmp_path / 'theirs'), arrays(tmp_path / 'again')
    assert before.keys() == after.keys()
    for part, array in before.items():
        np.testing.assert_array_equal(array, after[part])
    read = [files.read_json_object(tmp_path / folder / files.CONFIG_FILE) for folder in ('theirs', 'again')]
    assert convert_module.parse_hf_config(read[0], 'theirs') == convert_module.parse_hf_config(read[1], 'again')
    ours = transformers.AutoTokenizer.from_pretrained(tmp_path / 'again')
    assert ours('abc def')['input_ids'] == tokens.parse_tokenizer(tokenizer, 'it').encode('abc def').ids
    assert (ours.eos_token_id, again.generation_config.eos_token_id) == (0, 0)


def test_import_and_export_support_bfloat16_and_several_files(tokenizer, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(files, 'MAX_FILE_BYTES', 20_000)
    model = made('llama, 2 kv heads', tmp_path / 'theirs', tokenizer, torch.bfloat16)
    run = brought(capsys, tmp_path / 'theirs', tmp_path / 'run')
    assert_close(of_ours(run), of_theirs(model))
    run = run.rename(tmp_path / 'moved')  # the tokenizer is in the folder
    code, _, err = said(capsys, 'export', f'{run}@0', f'--out={tmp_path}/again', '--dtype=bfloat16', '--length=9')
    assert code == 0, err
    assert len(list((tmp_path / 'again').glob('model-0000?-of-0000?.safetensors'))) > 2
    before, after = arrays(tmp_path / 'theirs'), arrays(tmp_path / 'again')
    assert {array.dtype for array in after.values()} == {np.dtype('bfloat16')}
    for part, array in before.items():
        np.testing.assert_array_equal(array, after[part])
    assert files.read_json_object(tmp_path / 'again' / files.CONFIG_FILE)['max_position_embeddings'] == 9
    assert_close(of_ours(brought(capsys, tmp_path / 'again', tmp_path / 'run2')), of_theirs(model))


@pytest.fixture(scope='module')
def run(corpus, tmp_path_factory):
    """Train a run with every feature that can be exported, and a document mask."""
    path = tmp_path_factory.mktemp('ours') / 'run'
    fields = dict(kv_heads=2, tied=True, qk_norm=True, mask__document=True, rotary__base=77.0)
    changes = {f'model__{name}': value for name, value in fields.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('SINKLAB_CACHE', str(path.parent / 'cache'))
        train(tiny(data__source=corpus, **changes), path)
        yield path


def test_exported_run_matches_transformers_and_includes_tokenizer(run, tmp_path, capsys):
    code, out, err = said(capsys, 'export', run, f'--out={tmp_path}/out')
    assert code == 0, err
    assert 'qwen3' in out
    assert f'transformers {transformers.__version__}' in out
    model = loaded(tmp_path / 'out')
    ours = convert_module.compute_with_sinklab(read_spec(RunDir(run)).model, restore_parameters(run, 8), IDS)
    assert_close(ours, of_theirs(model))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / 'out')
    ids = tokenizer('abc', return_tensors='pt')
    told = model.generate(**ids, max_new_tokens=3, do_sample=False)
    assert tokenizer.decode(told[0]).startswith('abc')
    back = brought(capsys, tmp_path / 'out', tmp_path / 'back')
    for one, other in zip(leaves(back, 0), leaves(run, 8), strict=True):
        np.testing.assert_array_equal(one, other)


def test_export_with_different_results_leaves_no_files(run, tmp_path, capsys, monkeypatch):
    right = convert_module.ParameterSpec.convert_to_hf
    monkeypatch.setattr(convert_module.ParameterSpec, 'convert_to_hf', lambda leaf, array: right(leaf, array) * 1.001)
    code, _, err = said(capsys, 'export', run, f'--out={tmp_path}/out')
    assert (code, len(err.splitlines())) == (1, 1)
    assert 'deleted' in err
    assert list(tmp_path.iterdir()) == []


def test_export_rejects_another_tokenizer(run, tokenizer, tmp_path, capsys):
    (tmp_path / 'other.json').write_text(tokenizer.replace('"a"', '"b"'))
    given = ['export', run, f'--out={tmp_path}/out', f'--tokenizer={tmp_path}/other.json']
    code, _, err = said(capsys, *given)
    assert (code, len(err.splitlines())) == (1, 1)
    assert f'{tmp_path}/other.json' in err


def test_export_without_torch_names_extra_and_writes_nothing(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(convert, 'require_libraries', lambda: files.import_hf_library('torch_that_is_absent'))
    code, _, err = said(capsys, 'export', run, f'--out={tmp_path}/out')
    assert code == 1
    assert 'torch_that_is_absent' in err
    assert err.endswith(f'{format_extra_command("hf")}\n')
    assert list(tmp_path.iterdir()) == []


SIGMOID = ['--config.model.attention.similarity=sigmoid', '--config.model.attention.normalizer=none']
SMOKE = {'optimizer.steps': 3, 'optimizer.warmup_steps': 1, 'optimizer.batch_size': 4, 'data.length': 16}
SMOKE |= {
    'valid.windows': 6,
    'probe.sequences': 5,
    'probe.length': 12,
    'log.every_steps': 1,
    'model.dtype': 'float32',
}


def test_imported_model_is_fine_tuned_with_another_attention_operation(corpus, tokenizer, tmp_path, capsys):
    made('llama, 2 kv heads', tmp_path / 'theirs', tokenizer)
    given = [f'--config.{name}={value}' for name, value in (SMOKE | {'data.source': corpus}).items()]
    command = ['train', '--compiled=none', f'--from=hf:{tmp_path}/theirs', f'--workdir={tmp_path}/run']
    command += [*given, *SIGMOID]
    code, err = main(command), capsys.readouterr().err
    assert code == 0, err
    folder = RunDir(tmp_path / 'run')
    assert folder.read_json('config')['model']['kv_heads'] == 2
    assert folder.read_json('config')['optimizer']['peak_learning_rate'] == 2e-5
    assert 'fine-tuning' in err
    assert folder.read_lineage()['row'] == 'theirs'
    assert folder.read_lineage()['data'] == []
    assert any(
        change.startswith('model.attention.similarity exp -> sigmoid') for change in folder.read_lineage()['config']
    )
    theirs = flatten_dict(
        convert_module.read_params(read_spec(folder).model, files.SafetensorsReader(tmp_path / 'theirs'), 'theirs')
    )
    ours = flatten_dict(restore_parameters(folder.path, 0))
    jax.tree.map(np.testing.assert_array_equal, ours, {name: theirs[name] for name in ours})
    assert [record['step'] for record in folder.read_records()] == [0, 1, 2, 3]
    (tmp_path / 'theirs').rename(tmp_path / 'gone')
    assert main(command) == 0
    other = tmp_path / 'other.json'
    other.write_text(json.dumps(json.loads(tokenizer)))  # equal tokens, different bytes
    (tmp_path / 'gone').rename(tmp_path / 'theirs')
    command[3] = f'--workdir={tmp_path}/another'
    capsys.readouterr()
    assert main([*command, f'--config.data.tokenizer={other}']) == 1
    assert 'tokenizer' in capsys.readouterr().err
