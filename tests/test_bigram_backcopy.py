"""Bigram-Backcopy: sequences compared with their definition, metrics compared with NumPy."""

import dataclasses

import numpy as np
import pytest
from tiny_specs import make_tiny_spec

from sinklab.data import bigram_backcopy
from sinklab.data.run_data import load_run_data
from sinklab.errors import UserError
from sinklab.metrics import bigram_backcopy as bigram_metrics

TEXT = 'ab ab abc ba  cab  a b c d'
TASK = dict(data__task='backcopy', data__triggers=2, model__vocabulary=5, model__position='learned')


def make_chain(vocabulary=9, triggers=2):
    return bigram_backcopy.fit_chain([TEXT[:10], TEXT[11:]], vocabulary, triggers)


def test_fit_chain_orders_ids_by_character_frequency():
    chain = make_chain()
    text = TEXT[:10] + '\n' + TEXT[11:]
    counts = sorted((-text.count(c), c) for c in set(text))
    np.testing.assert_allclose(chain.unigram_V, [-count / len(text) for count, _ in counts])
    ids = {c: token_id for token_id, (_, c) in enumerate(counts)}
    for character, token_id in ids.items():
        next_characters = [text[position + 1] for position in range(len(text) - 1) if text[position] == character]
        for next_character, next_token_id in ids.items():
            expected = (
                next_characters.count(next_character) / len(next_characters)
                if next_characters
                else chain.unigram_V[next_token_id]
            )
            np.testing.assert_allclose(chain.bigram_VV[token_id, next_token_id], expected)


def test_fit_chain_drops_rare_characters_and_rejects_small_vocabulary():
    chain = make_chain(vocabulary=5)
    assert chain.begin_token == 4
    np.testing.assert_allclose(chain.bigram_VV.sum(1), 1)
    with pytest.raises(UserError, match=r'config\.data\.triggers'):
        make_chain(vocabulary=6, triggers=4)
    with pytest.raises(UserError, match=r'config\.data\.triggers'):
        bigram_backcopy.fit_chain([''], vocabulary=9, triggers=2)


def test_sample_sequences_repeats_token_before_trigger_after_it():
    chain = make_chain()
    ids_BT = bigram_backcopy.sample_sequences(chain, 200, 40, np.random.default_rng(0))
    assert (ids_BT[:, 0] == chain.begin_token).all()
    assert (ids_BT[:, 1:] < chain.begin_token).all()
    assert (ids_BT[:, 1] >= chain.triggers).all()
    previous_BT, trigger_BT, next_BT = ids_BT[:, :-2], ids_BT[:, 1:-1] < chain.triggers, ids_BT[:, 2:]
    np.testing.assert_array_equal(previous_BT[trigger_BT], next_BT[trigger_BT])
    current_BT = ids_BT[:, 1:-1]
    for token_id in range(chain.triggers, chain.begin_token):
        next_ids = next_BT[current_BT == token_id]
        frequency = np.bincount(next_ids, minlength=chain.begin_token) / len(next_ids)
        np.testing.assert_allclose(frequency, chain.bigram_VV[token_id], atol=4 / np.sqrt(len(next_ids)))


def test_sequences_depend_only_on_seed_and_step(corpus):
    spec = make_tiny_spec(data__source=corpus, **TASK)
    run_data, repeated_data = load_run_data(spec), load_run_data(spec)
    whole_batch = run_data.batches.read_rows(7, range(4))
    np.testing.assert_array_equal(run_data.batches.read_rows(7, range(1, 3)), whole_batch[1:3])
    rows = [
        data.batches.read_rows(step, range(4)) for data, step in ((run_data, 7), (repeated_data, 7), (run_data, 8))
    ]
    assert rows[0].tolist() == rows[1].tolist() != rows[2].tolist()
    other_data = load_run_data(dataclasses.replace(spec, data=dataclasses.replace(spec.data, seed=1)))
    assert run_data.valid_NT.tolist() != other_data.valid_NT.tolist()
    assert run_data.fingerprint['bigrams'] == other_data.fingerprint['bigrams']
    assert run_data.fingerprint['order'] == repeated_data.fingerprint['order'] != other_data.fingerprint['order']
    assert run_data.batches.read_rows(0, range(4)).shape == (4, 17)
    assert run_data.valid_NT.shape == (6, 17)
    assert run_data.probe_PT.shape == (5, 12)
    np.testing.assert_array_equal(run_data.is_trigger(run_data.probe_PT), run_data.probe_PT < 2)


def test_trigger_metrics_average_triggers_and_others_separately():
    rng = np.random.default_rng(0)
    first_token_attention_LPHT, trigger_PT = rng.random((2, 3, 4, 5)), rng.random((3, 5)) < 0.4
    metrics = bigram_metrics.compute_trigger_attention(first_token_attention_LPHT, trigger_PT)
    for group, is_trigger in (('trigger', True), ('other', False)):
        values = [
            first_token_attention_LPHT[layer, p, h, t]
            for layer in range(2)
            for p in range(3)
            for h in range(4)
            for t in range(1, 5)
            if trigger_PT[p, t] == is_trigger
        ]
        np.testing.assert_allclose(metrics[f'alpha/1/{group}'], np.mean(values))
    loss_NT, correct_NT = rng.random((3, 5)), rng.random((3, 5)) < 0.5
    metrics = bigram_metrics.compute_trigger_losses(loss_NT, correct_NT, trigger_PT)
    np.testing.assert_allclose(metrics['valid/loss/trigger'], loss_NT[trigger_PT].mean())
    np.testing.assert_allclose(metrics['valid/loss/other'], loss_NT[~trigger_PT].mean())
    np.testing.assert_allclose(metrics['valid/accuracy/trigger'], correct_NT[trigger_PT].mean())
