"""Tests of runs as models of lm-evaluation-harness against formulas for one text at a time."""

import dataclasses

import jax
import numpy as np
import pytest
import reference
from lm_eval_cases import QUESTIONS, TEXTS, encode_text, get_prefix_ids, score_continuation, score_last_ids
from tiny_specs import draw_params, make_tiny_spec

pytest.importorskip('lm_eval')

from lm_eval.api.instance import Instance
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from sinklab.analysis import lm_eval
from sinklab.analysis.lm_eval import SinklabLM
from sinklab.analysis.run_model import RunModel
from sinklab.errors import UserError
from sinklab.run_dir import RunDir

pytestmark = pytest.mark.slow
DATA_VARIANTS = {'plain': {}, 'fixed': dict(fixed_position=1), 'documents': dict(positions='reset')}


@pytest.fixture(scope='module', params=DATA_VARIANTS)
def random_run(request, finished_run):
    """Return a run with random nonzero parameters, for each way in which texts begin."""
    result = RunModel(RunDir(finished_run[0]), 8)
    data = dataclasses.replace(result.spec.data, **DATA_VARIANTS[request.param])
    mask = dataclasses.replace(result.spec.model.mask, document=request.param == 'documents')
    model = dataclasses.replace(result.spec.model, mask=mask)
    result.spec = dataclasses.replace(result.spec, data=data, model=model)
    result.params = jax.tree.map(jax.numpy.asarray, draw_params(result.spec, 0.3))
    return result


@pytest.fixture(autouse=True)
def several_lengths(monkeypatch):
    monkeypatch.setattr(lm_eval, 'MIN_LENGTH', 4)


def make_requests(kind, *arguments):
    return [Instance(kind, {}, argument, 0) for argument in arguments]


def test_loglikelihood_of_continuation_matches_formula(random_run):
    adapter = SinklabLM(random_run)
    pairs = [(question['question'], choice) for question in QUESTIONS for choice in question['choices']]
    assert {adapter.choose_length(len(adapter.tok_encode(''.join(pair)))) for pair in pairs} >= {8, 16}
    result = adapter.loglikelihood(make_requests('loglikelihood', *pairs), disable_tqdm=True)
    for (context, continuation), (score, is_greedy) in zip(pairs, result, strict=True):
        context_end = len(context.rstrip())  # lm_eval moves trailing spaces to the continuation
        expected = score_continuation(random_run, context[:context_end], context[context_end:] + continuation)
        np.testing.assert_allclose(score, expected[0], rtol=1e-4, err_msg=context)
        assert is_greedy == expected[1]


def test_loglikelihood_marks_argmax_continuation_as_greedy(random_run):
    adapter = SinklabLM(random_run)
    context = adapter.tok_encode('abc de')
    logits_TV, _, _ = reference.run_forward(random_run.params, np.array(context), random_run.spec)
    likeliest_id = int(logits_TV[-1].argmax())
    result = adapter._loglikelihood_tokens(
        [(None, context, [likeliest_id]), (None, context, [(likeliest_id + 1) % 300])], True
    )
    assert [is_greedy for _, is_greedy in result] == [True, False]


def test_loglikelihood_rolling_uses_windows_of_lm_eval(random_run):
    result = SinklabLM(random_run).loglikelihood_rolling(
        make_requests('loglikelihood_rolling', *((text,) for text in TEXTS)), True
    )
    prefix_ids, length = get_prefix_ids(random_run), random_run.spec.data.length
    for text, score in zip(TEXTS, result, strict=True):
        prefix_token = [random_run.spec.data.end_token, *prefix_ids][-1]
        windows = get_rolling_token_windows(encode_text(random_run, text), prefix_token, length - len(prefix_ids), 1)
        total, all_predicted = 0.0, []
        for number, (context, predicted) in enumerate(map(make_disjoint_window, windows)):
            total += score_last_ids(random_run, [*prefix_ids[: bool(number)], *context, *predicted], len(predicted))[
                0
            ]
            all_predicted += predicted
        assert all_predicted == encode_text(random_run, text)
        np.testing.assert_allclose(score, total, rtol=1e-4)


def test_loglikelihood_of_empty_context_conditions_on_prefix_or_end_token(random_run):
    adapter = SinklabLM(random_run)
    assert adapter.loglikelihood_rolling(make_requests('loglikelihood_rolling', ('',)), True) == [0.0]
    result = adapter.loglikelihood(make_requests('loglikelihood', ('', 'abc'), (' ', 'abc')), disable_tqdm=True)
    (score, _), (after_space, _) = result
    np.testing.assert_allclose(after_space, score_continuation(random_run, '', ' abc')[0], rtol=1e-4)
    np.testing.assert_allclose(score, score_continuation(random_run, '', 'abc')[0], rtol=1e-4)
    ids = [[random_run.spec.data.end_token, *get_prefix_ids(random_run)][-1], *encode_text(random_run, 'abc')]
    np.testing.assert_allclose(score, score_last_ids(random_run, ids, len(ids) - 1)[0], rtol=1e-4)


def test_generation_is_refused(random_run):
    with pytest.raises(UserError):
        SinklabLM(random_run).generate_until(make_requests('generate_until', (TEXTS[0], {})), True)


@pytest.mark.parametrize(
    'changes',
    [
        dict(data__task='backcopy', data__triggers=3),
        dict(model__mask__prefix=3),
        dict(data__fixed_position=3),
        dict(data__random_first=2, data__random_last=3),
    ],
)
def test_check_scorable_rejects_run_without_text_likelihood(changes):
    with pytest.raises(UserError):
        lm_eval.check_scorable(make_tiny_spec(**changes), 'a run')


def test_check_scorable_accepts_fixed_token_absent_from_held_out_text():
    spec = make_tiny_spec(data__fixed_position=3)
    lm_eval.check_scorable(
        dataclasses.replace(spec, data=dataclasses.replace(spec.data, fixed_held_out=False)), 'a run'
    )
