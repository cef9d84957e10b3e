"""The whole model in NumPy and float64, one sequence and one head at a time, by the formulas of formulas.py."""

import dataclasses
import math

import formulas
import numpy as np

END_OF_TEXT = 0
COLUMN = ('sink_token', 'k', 'kv', 'logit')  # what stands left of the text in a row of attention


@dataclasses.dataclass
class Place:
    position_T: np.ndarray  # of the queries, a sink token's the first
    bias_HTS: np.ndarray  # of their scores with one another
    visible_TS: np.ndarray  # the column, too, if there is one


def forward(params, token_T, spec):
    """(logits_TV, attention_LHTS with the column left of the text, residual_LTD) of one sequence of the text."""
    model, sinks = spec.model, int(spec.model.columns.kind == 'sink_token')
    params = double(params)
    place = placed(params, token_T, spec)
    x = params['embedding_VD'][token_T]
    if sinks:
        x = np.concatenate([params['sink']['vector_TD'], x])
    if model.position == 'absolute':
        x = x + formulas.sinusoids(place.position_T, model.width)
    if model.position == 'learned':
        x = x + params['position']['table_TD'][place.position_T]
    attentions, residuals = [], []
    for layer in range(model.layers):
        x, attention_HTS, residual_TD = block(take(params['blocks'], layer), x, place, spec)
        attentions.append(attention_HTS[:, sinks:])
        residuals.append(residual_TD[sinks:])
    if model.norm != 'post':
        x = formulas.rms_norm(x, params['norm']['gain_D'], model.norm_epsilon)
    head_VD = params['embedding_VD' if model.tied else 'head_VD']
    return x[sinks:] @ head_VD.T, np.stack(attentions), np.stack(residuals)


def placed(params, token_T, spec):
    model, length = spec.model, len(token_T)
    document_T = np.array([np.sum(token_T[:t] == END_OF_TEXT) for t in range(length)])
    position_T = np.arange(length)
    if spec.data.positions == 'reset':
        position_T = np.array([t - list(document_T).index(document_T[t]) for t in range(length)])
    visible_TS = formulas.visible(length, model.mask, document_T)
    if model.columns.kind in COLUMN:
        visible_TS = np.insert(visible_TS, 0, True, axis=1)
    if model.columns.kind == 'sink_token':
        position_T = np.insert(position_T + 1, 0, 0)
        visible_TS = np.insert(visible_TS, 0, np.arange(length + 1) == 0, axis=0)
    table_RH = params['position']['table_RH'] if model.position == 'relative_t5' else None
    return Place(position_T, formulas.position_bias(model.position, position_T, model.heads, table_RH), visible_TS)


def block(weights, x, place, spec):
    """(the stream after the block, attention_HTS, the stream before a norm that joins it)."""
    model = spec.model

    def norm(branch, where, x):
        return formulas.rms_norm(x, weights[f'{branch}_norms'][where]['gain_D'], model.norm_epsilon)

    attended, attention_HTS = self_attention(
        weights['attention'], x if model.norm == 'post' else norm('attention', 'before', x), place, spec
    )
    x = x + (norm('attention', 'after', attended) if model.norm == 'sandwich' else attended)
    if model.norm == 'post':
        x = norm('attention', 'joined', x)
    hidden = formulas.ffn(x if model.norm == 'post' else norm('ffn', 'before', x), weights['ffn'], model.ffn)
    total = x + (norm('ffn', 'after', hidden) if model.norm == 'sandwich' else hidden)
    return norm('ffn', 'joined', total) if model.norm == 'post' else total, attention_HTS, total


def self_attention(weights, x, place, spec):
    model = spec.model
    attentions, outputs = zip(*(head(h, weights, x, place, spec) for h in range(model.heads)), strict=True)
    if model.combination == 'concatenate':
        output_HKD = weights['output_HKD']
        return np.concatenate(outputs, -1) @ output_HKD.reshape(-1, model.width), np.stack(attentions)
    return sum(outputs) @ weights['output_HKD'][0], np.stack(attentions)


def head(h, weights, x, place, spec):
    """(attention_TS, output_TK) of head h."""
    model = spec.model
    query, key = (rotated(name, h, weights, x, place, model) for name in ('query', 'key'))
    own = projected('value', h // (model.heads // model.num_kv_heads), weights, x)
    value = own * formulas.sigmoid(x @ weights['gate']['weight_DHK'][:, h]) if model.gate == 'value' else own
    bias_TS = place.bias_HTS[h]
    if model.columns.kind in ('k', 'kv'):
        column = column_of(h, weights['columns'], value.shape[-1], model)
        key, value = np.vstack([column[0], key]), np.vstack([column[1], value])
        bias_TS = np.insert(bias_TS, 0, 0.0, axis=1)
    query, key = (mapped(y, weights, model.attention.feature_map) for y in (query, key))
    score_TS = query @ key.T / math.sqrt(model.head_width) + bias_TS
    if model.columns.kind == 'logit':
        score_TS = np.insert(score_TS, 0, one_of(weights['columns']['score_H'], h)[0], axis=1)
        value = np.vstack([np.zeros(value.shape[-1]), value])
    score_TS = score_TS + model.attention.offset * math.log(spec.data.length)
    columns = int(model.columns.kind in COLUMN)
    attention_TS = formulas.weights(score_TS, place.visible_TS, model.attention, columns)
    output_TK = attention_TS @ value
    if model.columns.kind == 'v':
        output_TK = output_TK + one_of(weights['columns']['value_HK'], h)
    if model.head_norm:
        output_TK = formulas.rms_norm(output_TK, weights['head_norm']['gain_D'], model.norm_epsilon)
    return attention_TS, output_TK * output_gate(h, weights, x, own, model)


def rotated(name, h, weights, x, place, model):
    """Queries or keys of head h: projected, normed and rotated."""
    y = projected(name, h if name == 'query' else h // (model.heads // model.num_kv_heads), weights, x)
    if model.qk_norm:
        y = formulas.rms_norm(y, weights[f'{name}_norm']['gain_D'], model.norm_epsilon)
    if model.position == 'rotary':
        y = formulas.rotate(y, place.position_T, model.rotary)
    return y


def projected(name, h, weights, x):
    bias_HK = weights.get(f'{name}_bias', {}).get('vector_HK')
    return x @ weights[f'{name}_DHK'][:, h] + (0 if bias_HK is None else bias_HK[h])


def mapped(y, weights, feature_map):
    if feature_map == 'elu1':
        return formulas.elu1(y)
    if feature_map == 'mlp':
        return formulas.relu(y @ weights['feature_map']['in_KK']) @ weights['feature_map']['out_KK']
    return y


def column_of(h, weights, value_width, model):
    """The key and the value that head h sees beside the text."""
    key = np.zeros(model.head_width)
    learned = one_of(weights['key_HK'], h)
    key[: len(learned)] = learned
    if model.columns.kind == 'kv':
        return key, one_of(weights['value_HK'], h)
    norm = model.columns.value_norm
    fixed = {
        'zero': lambda: np.zeros(value_width),
        'first': lambda: norm * np.eye(value_width)[0],
        'uniform': lambda: norm * np.ones(value_width) / math.sqrt(value_width),
    }
    return key, fixed[model.columns.value]()


def output_gate(h, weights, x, value, model):
    if model.gate in ('none', 'value'):
        return 1.0
    of = value if model.gate == 'value_state' else x
    weight_DHK = weights['gate']['weight_DHK']
    return formulas.sigmoid(of @ weight_DHK[:, 0 if model.gate == 'shared' else h])


def one_of(vector_HK, h):
    """Head h's own, or the one for all of them."""
    return vector_HK[h] if len(vector_HK) > 1 else vector_HK[0]


def double(tree):
    return {name: double(leaf) if isinstance(leaf, dict) else np.float64(leaf) for name, leaf in tree.items()}


def take(tree, layer):
    """One layer of stacked parameters."""
    return {name: take(leaf, layer) if isinstance(leaf, dict) else leaf[layer] for name, leaf in tree.items()}
