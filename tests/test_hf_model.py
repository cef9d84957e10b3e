"""Tests of Hugging Face models of every family against the results of transformers."""

import json

import numpy as np
import open_models
import pytest
import threadpoolctl
from tiny_specs import make_case_params

pytest.importorskip('torch', reason='open models need torch, which has no wheel here')
pytest.importorskip('transformers', reason='open models need transformers')

import torch
import transformers
from tokenizers import Tokenizer, processors

from sinklab.analysis import measure
from sinklab.analysis.hf_model import HFModel
from sinklab.cli.main import main

pytestmark = pytest.mark.slow  # transformers takes seconds to import

FAMILIES = tuple(open_models.make_configs())
IDS_PT = np.random.default_rng(0).integers(2, open_models.VOCABULARY, (3, 16))
T = IDS_PT.shape[1]
# Families with softmax over the whole text, in which repeated tokens have equal states.
PLAIN_SOFTMAX_FAMILIES = 'gpt_neox', 'llama', 'qwen3', 'gemma'


@pytest.fixture(scope='module', params=FAMILIES)
def model(request, tmp_path_factory):
    """Return (family, model of transformers, HFModel)."""
    folder = tmp_path_factory.mktemp(request.param)
    hf_model = open_models.save_model(open_models.make_configs()[request.param], folder)
    return request.param, hf_model, HFModel(str(folder))


def capture_arrays(subject, *names):
    arrays = subject.capture(IDS_PT, lambda layer: {name: layer[name] for name in names if name in layer})
    return [np.float64(arrays[name]) for name in names]


def test_captured_attention_and_residual_match_transformers(model):
    family, hf_model, subject = model
    attention, residual = open_models.run_transformers(hf_model, IDS_PT)
    captured_attention, captured_residual = capture_arrays(subject, 'attention_LPHTS', 'residual_LPTD')
    if family == 'gpt_oss':
        # The captured attention includes the sink column before the text.
        np.testing.assert_allclose(captured_attention.sum(-1), 1, atol=1e-5)
        captured_attention = captured_attention[..., 1:]
    np.testing.assert_allclose(captured_attention, attention, atol=1e-5)
    np.testing.assert_allclose(captured_residual[:-1], residual, rtol=1e-5, atol=1e-5 * np.abs(residual).max())
    np.testing.assert_allclose(captured_attention * ~np.tri(T, dtype=bool), 0)


def test_captured_queries_keys_and_values_reproduce_attention(model):
    _, _, subject = model
    names = 'attention_LPHTS', 'query_LPTHK', 'key_LPSHK', 'value_LPSHK', 'head_LPTHK'
    attention, query, key, value, head = capture_arrays(subject, *names)
    np.testing.assert_allclose(np.einsum('lphts,lpshk->lpthk', attention, value), head, atol=1e-4)
    columns = subject.make_context(T).learned_keys
    score = np.einsum('lpthk,lpshk->lphts', query, key[:, :, columns:]) / np.sqrt(query.shape[-1])
    is_visible = attention[..., columns:] > 0
    weight = np.exp(score - np.where(is_visible, score, -np.inf).max(-1, keepdims=True)) * is_visible
    share = attention[..., columns:] / attention[..., columns:].sum(-1, keepdims=True)
    np.testing.assert_allclose(weight / weight.sum(-1, keepdims=True), share, atol=1e-4)


@pytest.mark.parametrize('model', make_case_params(FAMILIES, ['llama', 'gpt_oss', 'jamba']), indirect=True)
def test_metrics_match_matrices_of_transformers(model):
    _family, hf_model, subject = model
    attention, residual = (np.float64(item) for item in open_models.run_transformers(hf_model, IDS_PT))
    measured = measure.measure_model(subject, IDS_PT, keys=2).numbers
    alphas = [[matrix[k:, k].sum() / (T - k) for k in range(2)] for matrix in attention.reshape(-1, T, T)]
    for k in range(2):
        np.testing.assert_allclose(measured[f'alpha/{k + 1}'], np.mean(alphas, 0)[k], rtol=1e-5)
        np.testing.assert_allclose(measured[f'sink/{k + 1}'], 100 * np.mean(np.array(alphas)[:, k] > 0.3))
    norm = np.linalg.norm(residual, axis=-1).mean(1)
    for layer, item in enumerate(norm, 1):
        np.testing.assert_allclose(measured[f'norm/ratio/{layer:02}'], item[0] / item[1:].mean(), rtol=1e-5)


@pytest.mark.parametrize('model', make_case_params(FAMILIES, ['llama']), indirect=True)
def test_metrics_do_not_depend_on_batch_size(model, monkeypatch):
    _, _, subject = model
    expected = measure.measure_model(subject, IDS_PT).numbers
    monkeypatch.setattr('sinklab.analysis.hf_model.MAX_BATCH_BYTES', 1)
    small_batch_numbers = measure.measure_model(subject, IDS_PT).numbers
    for name, value in expected.items():
        np.testing.assert_allclose(small_batch_numbers[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.fixture(scope='module')
def gpt2(tmp_path_factory):
    folder = tmp_path_factory.mktemp('open') / 'gpt2-xl'
    folder.mkdir()
    return folder, open_models.save_model(
        open_models.make_configs()['gpt2'], folder, open_models.make_tokenizer_json()
    )


def test_capture_with_swapped_positions_equals_swapped_position_embeddings(gpt2):
    folder, hf_model = gpt2
    subject, table_TD = HFModel(str(folder)), hf_model.transformer.wpe.weight
    original_TD = table_TD.detach().clone()
    with torch.no_grad():
        table_TD[[0, 4]] = original_TD[[4, 0]]
        expected, _ = open_models.run_transformers(hf_model, IDS_PT)
        table_TD[:] = original_TD
    position_T = np.arange(T)
    position_T[[0, 4]] = 4, 0
    captured = subject.capture(IDS_PT, lambda layer: {'a_LPHTS': layer['attention_LPHTS']}, position_T)
    np.testing.assert_allclose(captured['a_LPHTS'], expected, atol=1e-5)


def test_measure_command_prints_published_values(gpt2, capsys, tmp_path):
    (tmp_path / 'a.txt').write_text(open_models.SAMPLE_TEXT)
    arguments = ['measure', f'hf:{gpt2[0]}', f'--source=text:{tmp_path}/*.txt', '--sequences=1', '--length=64']
    arguments += ['--inputs=natural,random,repeated', '--lengths=4,64', '--eps=0.2,0.3', '--json']
    assert main(arguments) == 0
    results = json.loads(capsys.readouterr().out)
    assert results['published'] == {'natural': 77.0, 'random': 70.29, 'repeated': 62.28}
    assert results['inputs'].keys() == {'natural', 'random', 'repeated'}
    assert results['inputs']['natural']['sink/1/T64@0.3'] == results['inputs']['natural']['sink/1']
    assert measure.find_published(f'hf:{gpt2[0]}', 32) == {}


@pytest.mark.parametrize('model', PLAIN_SOFTMAX_FAMILIES, indirect=True)
def test_repeated_token_has_equal_states_and_bounded_attention(model):
    _, _, subject = model
    numbers = measure.measure_model(subject, np.full((2, T), 7), repeated=True).numbers
    assert max(value for name, value in numbers.items() if name.startswith('repeated/spread/')) <= 1e-4
    assert numbers['repeated/bound'] <= 1e-5


def test_token_losses_match_transformers(model):
    _, hf_model, subject = model
    ids = torch.as_tensor(IDS_PT)
    with torch.inference_mode():
        expected = hf_model(input_ids=ids, labels=ids).loss
    np.testing.assert_allclose(subject.compute_token_losses(IDS_PT).mean(), float(expected), rtol=1e-5)


def test_loss_over_large_vocabulary_has_rounding_errors_of_float32(tmp_path):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50_000, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.lm_head.weight.data *= 50
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        logits_PTV = model(torch.as_tensor(IDS_PT)).logits[:, :-1].double()
    expected = torch.nn.functional.cross_entropy(logits_PTV.transpose(1, 2), torch.as_tensor(IDS_PT[:, 1:])).item()
    assert abs(HFModel(tmp_path).compute_token_losses(IDS_PT).mean(dtype=np.float64) - expected) < 1e-6 * expected


def test_text_begins_with_one_bos_and_ends_without_eos(tmp_path):
    open_models.save_model(open_models.make_configs()['llama'], tmp_path, open_models.make_tokenizer_json())
    tokenizer = Tokenizer.from_file(str(tmp_path / 'tokenizer.json'))
    tokenizer.add_special_tokens(['<s>', '</s>'])
    tokens = [(name, tokenizer.token_to_id(name)) for name in ('<s>', '</s>')]
    tokenizer.post_processor = processors.TemplateProcessing(single='<s> $A </s>', special_tokens=tokens)
    tokenizer.save(str(tmp_path / 'tokenizer.json'))
    subject = HFModel(tmp_path)
    subject.vocabulary = tokenizer.get_vocab_size()
    text_ids = tokenizer.encode('import os', add_special_tokens=False).ids
    bos = tokens[0][1]
    assert subject.encode('import os') == subject.encode('<s>import os') == [bos, *text_ids]
    assert subject.encode_windows('import os', 3)[0] == [bos, *text_ids[:2]]
    assert HFModel(tmp_path, 'none').encode('import os') == text_ids


@pytest.mark.parametrize('model', make_case_params(FAMILIES, ['llama']), indirect=True)
def test_dtype_of_open_model_changes_numbers_as_rounding_does(model):
    """Compare with float32. Each operation in bfloat16 rounds by at most 2^-9 of a value.

    The shares of attention are at most 1, and some ten operations lie between the embedding and the scores.
    """
    _, _, subject = model
    bfloat16_model = HFModel(str(subject.model_dir), dtype='bfloat16')
    assert bfloat16_model.available_arrays == subject.available_arrays
    assert bfloat16_model.array_layers == subject.array_layers
    arrays = bfloat16_model.capture(IDS_PT, lambda layer: layer)
    assert {array.dtype for array in arrays.values()} == {np.dtype('float32')}
    numbers, exact_numbers = (measure.measure_model(item, IDS_PT).numbers for item in (bfloat16_model, subject))
    assert 0 < abs(numbers['alpha/1'] - exact_numbers['alpha/1']) < 10 * 2**-9
    losses, exact_losses = (item.compute_token_losses(IDS_PT) for item in (bfloat16_model, subject))
    assert 0 < np.abs(losses - exact_losses).max() < 10 * 2**-9 * exact_losses.max()


@pytest.mark.parametrize('bos', ['auto', 'none', 'force'])
def test_encode_windows_splits_text_and_repeats_prefix(gpt2, bos):
    subject, length = HFModel(str(gpt2[0]), bos), 8
    ids = subject.encode(open_models.SAMPLE_TEXT)
    windows = subject.encode_windows(open_models.SAMPLE_TEXT, length)
    prefix_ids = subject.encode('')
    assert len(prefix_ids) == (bos == 'force')
    assert windows[0] == ids[:length]
    assert {(len(window), *window[: len(prefix_ids)]) for window in windows} == {(length, *prefix_ids)}
    window_ids = [token_id for window in windows for token_id in window[len(prefix_ids) :]]
    assert window_ids == ids[len(prefix_ids) :][: len(window_ids)]
    assert len(ids) - len(prefix_ids) - len(window_ids) < length - len(prefix_ids)


@pytest.mark.parametrize(
    'damage',
    [
        lambda folder: (folder / 'model.safetensors').rename(folder / 'pytorch_model.bin'),
        lambda folder: (folder / 'model.safetensors').write_bytes(b'x' * 100),
        lambda folder: remove_half_of_arrays(folder / 'model.safetensors'),
        lambda folder: change_vocabulary(folder),
    ],
    ids=('pickle', 'weights', 'arrays', 'vocabulary'),
)
def test_damaged_model_is_rejected_with_one_line(tmp_path, capsys, damage):
    config = open_models.make_configs()['gpt2']
    open_models.save_model(config, tmp_path, open_models.make_tokenizer_json())
    damage(tmp_path)
    (tmp_path / 'text.txt').write_text(open_models.SAMPLE_TEXT)
    capsys.readouterr()
    arguments = [f'--source=text:{tmp_path}/text.txt', '--sequences=1', '--length=16']
    assert main(['measure', f'hf:{tmp_path}', *arguments]) == 1
    assert capsys.readouterr().err.strip().count('\n') == 0


def remove_half_of_arrays(path):
    from safetensors.numpy import load_file, save_file

    arrays = load_file(path)
    save_file({name: arrays[name] for name in sorted(arrays)[: len(arrays) // 2]}, path, metadata={'format': 'pt'})


def change_vocabulary(folder):
    tokenizer = Tokenizer.from_file(str(folder / 'tokenizer.json'))
    tokenizer.add_tokens([*(f'zz{number}' for number in range(128)), 'import os'])
    tokenizer.save(str(folder / 'tokenizer.json'))


def test_metrics_are_computed_with_one_blas_thread(gpt2):
    """Threads of NumPy would compete with those of PyTorch for the same cores."""

    def count_threads():
        return [pool['num_threads'] for pool in threadpoolctl.threadpool_info() if pool['user_api'] == 'blas']

    def extract(arrays):
        counts_during_capture.append(count_threads())
        return {}

    counts_during_capture, counts_before = [], count_threads()
    HFModel(gpt2[0]).capture(np.zeros((1, 4), int), extract)
    assert {count for counts in counts_during_capture for count in counts} == {1}
    assert count_threads() == counts_before
