import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_specs import make_tiny_spec

from sinklab.analysis import measure
from sinklab.data.documents import Document
from sinklab.errors import UserError
from sinklab.metrics import sink
from sinklab.metrics.metric import make_context


def make_attention(length, columns, seed, prefix=1):
    """Return two matrices whose queries see the columns, the prefix and no later token."""
    A = np.random.default_rng(seed).random((2, length, columns + length))
    t, s = np.indices((length, length))
    A[..., columns:] *= (s <= t) | (s < prefix)
    return A


def test_compute_window_edge_of_window_one_is_own_key():
    A = make_attention(6, 1, 0)
    np.testing.assert_allclose(sink.compute_window_edge(A, 1, 1), np.mean([A[:, t, 1 + t] for t in range(1, 6)], 0))


def test_compute_sink_rate_applies_strict_threshold_per_sequence():
    alpha_LPH = np.array([[[0.3], [0.31], [0.9], [0.0]]])  # one layer, four sequences, one head
    assert sink.compute_sink_rate(alpha_LPH) == 50.0
    assert sink.compute_sink_rate(alpha_LPH.mean(1)) == 100.0  # the mean over sequences would hide it


def test_star_metric_reports_rates_with_and_without_own_query():
    star_LPH = np.array([[[0.35], [0.29]]])  # one layer, two sequences, one head
    context = make_context(make_tiny_spec(model__learned_kv__kind='kv', data__length=64), 64, 1)
    (metric,) = (metric for metric in sink.METRICS if 'star_LH' in metric.saved_arrays)
    actual = metric.compute_numbers(dict(star_LPH=star_LPH), context)
    assert (actual['sink/star'], actual['sink/star/clean']) == (100, 50)  # (1 + 64 * 0.29) / 65 is 0.301
    assert actual['alpha/star/clean'] == pytest.approx(0.32)
    assert actual['alpha/star'] == pytest.approx((1 + 64 * 0.32) / 65)


def test_compute_prefix_numbers_finds_sink_per_sequence():
    """Use one head whose sink is the second token in one text and the third in the other."""
    alpha_LPHJ = np.array([[[[0.1, 0.5, 0.0]], [[0.1, 0.0, 0.6]]]])
    actual = sink.compute_prefix_numbers(alpha_LPHJ)
    assert actual == {'sink/prefix': 100, 'argmax/1': 0, 'argmax/2': 50, 'argmax/3': 50}


def test_compute_prefix_numbers_counts_argmax_without_threshold():
    actual = sink.compute_prefix_numbers(np.array([[[[0.1, 0.2]], [[0.4, 0.0]]]]))
    assert actual == {'sink/prefix': 50, 'argmax/1': 50, 'argmax/2': 50}


def test_compute_importance_of_fully_attended_prefix_token_is_one():
    """Average over all T queries, since a mean over T - k + 1 queries would exceed 1."""
    A = np.zeros((12, 12))
    A[:, 3] = 1
    np.testing.assert_allclose(sink.compute_importance(A, 5, prefix=4), [0, 0, 0, 1, 0], rtol=1e-6)


class CharacterModel:
    """A model whose tokens are the characters of a text, after a first token."""

    def encode(self, text):
        return [1, *map(ord, text)]

    def encode_windows(self, text, length):
        ids, size = self.encode(text)[1:], length - 1
        return [[1, *ids[start : start + size]] for start in range(0, len(ids) - size + 1, size)]


@given(st.lists(st.integers(0, 150), max_size=6), st.integers(1, 12), st.integers(2, 9))
def test_sequences_are_windows_of_documents_in_rounds(sizes, sequences, length):
    texts = [''.join(map(chr, range(1000 * number, 1000 * number + size))) for number, size in enumerate(sizes, 1)]
    windows = [CharacterModel().encode_windows(text, length) for text in texts]
    expected_windows = [window for window in itertools.chain(*itertools.zip_longest(*windows)) if window]
    request, remarks = measure.MeasureRequest(sequences=sequences, length=length, source='text:a'), []
    with pytest.MonkeyPatch.context() as patch:
        documents = [Document(str(number), ((text, True),)) for number, text in enumerate(texts)]
        patch.setattr(measure, 'open_source', lambda _: SimpleNamespace(read_documents=lambda: documents))
        if len(expected_windows) < sequences:
            with pytest.raises(UserError):
                measure.read_texts(CharacterModel(), request, remarks.append)
            return
        ids_PT = measure.read_texts(CharacterModel(), request, remarks.append)
    assert ids_PT.tolist() == expected_windows[:sequences]
    num_documents = sum(map(bool, windows))
    assert len(remarks) == (num_documents < sequences)
