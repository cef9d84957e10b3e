"""Norms of hidden states, keys and values of the first token, and its share of a head's output."""

from typing import Any

import numpy as np

from sinklab.metrics.metric import (
    FigureSpec,
    Metric,
    MetricContext,
    MetricInfo,
    make_head_metric,
    name_by_layer,
)
from sinklab.metrics.sink import EPSILON

HIDDEN_SENTENCE = 'Norm of the first hidden state over the mean of the others, after each block.'
MASSIVE_SENTENCE = (
    f'{HIDDEN_SENTENCE} Hidden state 0 is the embedding, as in transformers. Ratios of hundreds are massive '
    'activations (Sun et al., 2024).'
)
KEY_SENTENCE = 'Norm of the first key, as used in attention, over the mean of the others, in each layer.'
VALUE_SENTENCE = 'Norm of the first value over the mean of the others, in each layer.'


def compute_norms(array_TD):
    """Compute ||x_t||_2 of each token, in float32."""
    return array_TD.__array_namespace__().linalg.norm(array_TD.astype('float32'), axis=-1)


def compute_first_ratio(norm_T) -> np.ndarray:
    """Compute ||x_1|| / mean_{t > 1} ||x_t|| from the norms."""
    norm_T = np.asarray(norm_T)
    return norm_T[..., 0] / norm_T[..., 1:].mean(-1)


def compute_text_norms(array_LPSHK, context: MetricContext):
    """Compute the mean over heads of the norms of keys or values of the text, _LPT."""
    return compute_norms(array_LPSHK[:, :, context.learned_keys :]).mean(-1)


def compare_first_with_others(name: str, norm_LPT) -> dict[str, float]:
    """Return norm/NAME/1, norm/NAME/other and their ratio; both are means over sequences, layers and heads."""
    first, other = float(np.mean(norm_LPT[..., 0])), float(np.mean(norm_LPT[..., 1:]))
    norm_ratio = (
        first / other if other else np.nan
    )  # keys that are all 0, as those of an untrained Zaya, have no ratio
    return {f'norm/{name}/1': first, f'norm/{name}/other': other, f'norm/{name}/ratio': norm_ratio}


def make_norm_infos(name: str) -> tuple[MetricInfo, ...]:
    sentence = f'Mean norm of the {name} vectors in attention: of the first token, of other tokens, and their ratio.'
    return tuple(
        MetricInfo(f'norm/{name}/{part}', f'{name} norm {part}', sentence) for part in ('1', 'other', 'ratio')
    )


def make_first_token_metric(name: str, title: str, caption: str) -> Metric:
    """Make the metric that compares the first key or value of the text with the others."""
    return Metric(
        inputs=(f'{name}_LPSHK',),
        compute_arrays=lambda array, context: {f'{name}_LPT': compute_text_norms(array, context)},
        compute_numbers=lambda arrays, context: compare_first_with_others(name, arrays[f'{name}_LPT']),
        infos=make_norm_infos(name),
        saved_arrays=(f'{name}_LT',),
        figure=FigureSpec('ratios', f'{name}_LT', title, 'norm ratio', caption, transform=compute_first_ratio),
    )


def make_ratio_metric(
    input_name: str, array_name: str, name: str, sentence: str, first: int = 1, **fields: Any
) -> Metric:
    """Make the metric NAME/LL of a ratio of means over sequences, as in the released code, in each layer.

    The ratio is that of the norm of the first token to the mean of the others; `first` as in `name_by_layer`.
    """
    array_LPT = f'{array_name}_LPT'
    return Metric(
        inputs=(input_name,),
        compute_arrays=lambda array, context: {array_LPT: compute_norms(array)},
        compute_numbers=lambda arrays, context: name_by_layer(
            name, compute_first_ratio(np.mean(arrays[array_LPT], 1)), first
        ),
        infos=(MetricInfo(f'{name}/{{k}}', f'{array_name} ratio {{k}}', sentence),),
        saved_arrays=(f'{array_name}_LT',),
        **fields,
    )


METRICS = (
    make_ratio_metric(
        'residual_LPTD',
        'norm',
        'norm/ratio',
        HIDDEN_SENTENCE,
        figure=FigureSpec(
            'ratios',
            'norm_LT',
            'Hidden states of the first token',
            'norm ratio',
            MASSIVE_SENTENCE,
            transform=compute_first_ratio,
            first_row=1,
        ),
    ),
    make_first_token_metric('key', 'Keys of the first token', KEY_SENTENCE),
    make_first_token_metric('value', 'Values of the first token', VALUE_SENTENCE),
)


def compute_first_contribution(attention_LPHTS, value_LPSHK, head_LPTHK, context: MetricContext):
    """Compute the mean over the queries i > 1 of ||A_i1 v_1|| / ||o_i||, _LPH; 0 where the output is 0."""
    weight_LPTH = abs(attention_LPHTS[..., context.learned_keys]).swapaxes(-1, -2)
    added_LPTH = weight_LPTH * compute_norms(value_LPSHK[:, :, context.learned_keys, None])
    return (added_LPTH / compute_norms(head_LPTHK).clip(EPSILON))[:, :, 1:].mean(2)


CONTRIBUTION_METRICS = (
    make_head_metric(
        'contribution',
        compute_first_contribution,
        (
            MetricInfo(
                'contribution/1',
                'contribution',
                "The first token's part of a head's output: mean of ||A_i1 v_1|| / ||o_i|| over i > 1.",
                in_table=True,
            ),
        ),
        inputs=('attention_LPHTS', 'value_LPSHK', 'head_LPTHK'),
        figure=FigureSpec('heads', 'contribution_LH', 'Contribution of the first token', '||A_i1 v_1|| / ||o_i||'),
    ),
)
