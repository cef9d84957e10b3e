"""Whole model in NumPy and float64, one sequence and one head at a time, with the formulas of formulas.py."""

import dataclasses
import math

import formulas
import numpy as np

END_OF_TEXT = 0
COLUMN_KINDS = ('sink_token', 'k', 'kv', 'logit')  # kinds that add a column left of the text to the attention


@dataclasses.dataclass
class PositionInfo:
    """Positions of the tokens of a sequence, and what attention derives from them."""

    position_T: np.ndarray  # of the queries; a sink token comes first
    bias_HTS: np.ndarray  # of the scores between tokens
    visible_TS: np.ndarray  # including the column, if there is one


def run_forward(params, token_T, spec):
    """Compute (logits_TV, attention_LHTS, residual_LTD) of one sequence.

    The attention includes the column left of the text.
    """
    model, sinks = spec.model, int(spec.model.learned_kv.kind == 'sink_token')
    params = convert_to_float64(params)
    position_info = make_position_info(params, token_T, spec)
    x = embed(params, model, token_T)
    if sinks:
        x = np.concatenate([params['sink']['vector_TD'], x])
    if model.position == 'absolute':
        x = x + formulas.compute_sinusoids(position_info.position_T, model.width)
    if model.position == 'learned':
        x = x + params['position']['table_TD'][position_info.position_T]
    attentions, residuals, first_x = [], [], x
    for layer in range(model.layers):
        layer_spec = make_layer_spec(spec, layer)
        position_info = make_position_info(params, token_T, layer_spec)
        weights = take_layer_with_first_values(params['blocks'], layer, first_x, model)
        x, attention_HTS, residual_TD = compute_block(weights, x, position_info, layer_spec)
        attentions.append(attention_HTS[:, sinks:])
        residuals.append(residual_TD[sinks:])
    if model.norm != 'post':
        x = compute_norm(params['norm'], x, model)
    head_VD = params['embedding_VD' if model.tied else 'head_VD']
    return x[sinks:] @ head_VD.T, np.stack(attentions), np.stack(residuals)


def embed(params, model, token_T):
    return params['embedding_VD'][token_T] * (math.sqrt(model.width) if model.scaled_embedding else 1)


def make_layer_spec(spec, layer):
    """Return the spec that describes a layer, counted from 0."""
    model, global_layers = spec.model, spec.model.global_layers
    if global_layers.every is None or (layer + 1) % global_layers.every:
        return spec
    fields = dict(position=global_layers.position, rotary=global_layers.rotary)
    mask = dataclasses.replace(model.mask, window=None)
    return dataclasses.replace(spec, model=dataclasses.replace(model, mask=mask, **fields))


def make_position_info(params, token_T, spec):
    model, length = spec.model, len(token_T)
    document_T = np.array([np.sum(token_T[:t] == END_OF_TEXT) for t in range(length)])
    position_T = np.arange(length)
    if spec.data.positions == 'reset':
        position_T = np.array([t - list(document_T).index(document_T[t]) for t in range(length)])
    visible_TS = formulas.compute_visibility(length, model.mask, document_T)
    if model.learned_kv.kind in COLUMN_KINDS:
        visible_TS = np.insert(visible_TS, 0, True, axis=1)
    if model.learned_kv.kind == 'sink_token':
        position_T = np.insert(position_T + 1, 0, 0)
        visible_TS = np.insert(visible_TS, 0, np.arange(length + 1) == 0, axis=0)
    table_RH = params['position']['table_RH'] if model.position == 'relative_t5' else None
    return PositionInfo(
        position_T, formulas.compute_position_bias(model.position, position_T, model.heads, table_RH), visible_TS
    )


def compute_block(weights, x, position_info, spec):
    """Compute one block.

    Returns:
        (the residual stream after the block, attention_HTS, the stream before a final norm on it).
    """
    model = spec.model

    def norm(branch, stage, x):
        return compute_norm(weights[f'{branch}_norms'][stage], x, model)

    has_before, has_after = model.norm in ('pre', 'sandwich'), model.norm in ('sandwich', 'res_post')
    attention_output, attention_HTS = compute_self_attention(
        weights['attention'], norm('attention', 'before', x) if has_before else x, position_info, spec
    )
    x = x + (norm('attention', 'after', attention_output) if has_after else attention_output)
    if model.norm == 'post':
        x = norm('attention', 'joined', x)
    hidden = formulas.compute_ffn(norm('ffn', 'before', x) if has_before else x, weights['ffn'], model.ffn)
    total = x + (norm('ffn', 'after', hidden) if has_after else hidden)
    return norm('ffn', 'joined', total) if model.norm == 'post' else total, attention_HTS, total


def compute_norm(weights, x, model):
    if model.norm_kind == 'dynamic_tanh':
        return weights['gain_D'] * np.tanh(weights['alpha'] * x) + weights['bias_D']
    normed = formulas.rms_norm(x, weights['gain_D'], model.norm_epsilon)
    if model.norm_kind == 'rms':
        return normed
    hidden = normed @ weights['in_DR']
    return normed * formulas.sigmoid(hidden * formulas.sigmoid(hidden) @ weights['out_RD'])


def compute_self_attention(weights, x, position_info, spec):
    model = spec.model
    attentions, outputs = zip(
        *(compute_head(h, weights, x, position_info, spec) for h in range(model.heads)), strict=True
    )
    if model.combination == 'differential':
        gate_HT = formulas.sigmoid(x @ weights['lambda_DHK'][..., 0]).T
        outputs = [outputs[2 * h] - gate_HT[h][:, None] * outputs[2 * h + 1] for h in range(model.heads // 2)]
    if model.combination in ('concatenate', 'differential'):
        output_HKD = weights['output_HKD']
        return np.concatenate(outputs, -1) @ output_HKD.reshape(-1, model.width), np.stack(attentions)
    return sum(outputs) @ weights['output_HKD'][0], np.stack(attentions)


def compute_head(h, weights, x, position_info, spec):
    """Compute (attention_TS, output_TK) of head h."""
    model = spec.model
    query, key = (project_and_rotate(name, h, weights, x, position_info, model) for name in ('query', 'key'))
    ungated_value = project('value', h // (model.heads // model.num_kv_heads), weights, x)
    if model.value_residual:
        ungated_value = (ungated_value + weights['first_values'][h // (model.heads // model.num_kv_heads)]) / 2
    value = (
        ungated_value * formulas.sigmoid(x @ weights['gate']['weight_DHK'][:, h])
        if model.gate == 'value'
        else ungated_value
    )
    bias_TS = position_info.bias_HTS[h]
    if model.forget_gate:
        bias_TS = formulas.compute_forget_bias(
            x @ weights['forget_gate']['weight_DH'][:, h] + weights['forget_gate']['bias_H'][h]
        )
    if model.learned_kv.kind in ('k', 'kv'):
        column = make_learned_column(h, weights['learned_kv'], value.shape[-1], model)
        key, value = np.vstack([column[0], key]), np.vstack([column[1], value])
        bias_TS = np.insert(bias_TS, 0, 0.0, axis=1)
    query, key = (apply_feature_map(y, weights, model.attention.feature_map) for y in (query, key))
    score_TS = query @ key.T / math.sqrt(model.head_width) + bias_TS
    if model.learned_kv.kind == 'logit':
        score_TS = np.insert(score_TS, 0, select_head(weights['learned_kv']['score_H'], h)[0], axis=1)
        value = np.vstack([np.zeros(value.shape[-1]), value])
    score_TS = score_TS + model.attention.offset * math.log(spec.data.length)
    columns = int(model.learned_kv.kind in COLUMN_KINDS)
    attention_TS = formulas.compute_weights(score_TS, position_info.visible_TS, model.attention, columns)
    output_TK = attention_TS @ value
    if model.exclusive != 'none':
        own_value = value[-len(x) :]
        component_T = (output_TK * own_value).sum(-1) / (own_value**2).sum(-1)
        share = weights['exclusion']['share_H'][h] if model.exclusive == 'gated' else 1
        output_TK = output_TK - share * component_T[:, None] * own_value
    if model.learned_kv.kind == 'v':
        output_TK = output_TK + select_head(weights['learned_kv']['value_HK'], h)
    if model.head_norm:
        output_TK = formulas.rms_norm(output_TK, weights['head_norm']['gain_D'], model.norm_epsilon)
    return attention_TS, output_TK * compute_output_gate(h, weights, x, ungated_value, model)


def project_and_rotate(name, h, weights, x, position_info, model):
    """Project, normalize and rotate the queries or keys of head h."""
    y = project(name, h if name == 'query' else h // (model.heads // model.num_kv_heads), weights, x)
    if model.qk_norm:
        y = formulas.rms_norm(y, weights[f'{name}_norm']['gain_D'], model.norm_epsilon)
    if model.position == 'rotary':
        y = formulas.rotate(y, position_info.position_T, model.rotary)
    return y


def project(name, h, weights, x):
    bias_HK = weights.get(f'{name}_bias', {}).get('vector_HK')
    return x @ weights[f'{name}_DHK'][:, h] + (0 if bias_HK is None else bias_HK[h])


def apply_feature_map(y, weights, feature_map):
    if feature_map == 'elu1':
        return formulas.elu1(y)
    if feature_map == 'mlp':
        return formulas.relu(y @ weights['feature_map']['in_KK']) @ weights['feature_map']['out_KK']
    return y


def make_learned_column(h, weights, value_width, model):
    """Return the key and the value of the learned column of head h."""
    key = np.zeros(model.head_width)
    learned_key = select_head(weights['key_HK'], h)
    key[: len(learned_key)] = learned_key
    if model.learned_kv.kind == 'kv':
        return key, select_head(weights['value_HK'], h)
    norm = model.learned_kv.value_norm
    make_value = {
        'zero': lambda: np.zeros(value_width),
        'first': lambda: norm * np.eye(value_width)[0],
        'uniform': lambda: norm * np.ones(value_width) / math.sqrt(value_width),
    }
    return key, make_value[model.learned_kv.value]()


def compute_output_gate(h, weights, x, value, model):
    if model.gate in ('none', 'value'):
        return 1.0
    gate_input = value if model.gate == 'value_state' else x
    weight_DHK = weights['gate']['weight_DHK']
    return formulas.sigmoid(gate_input @ weight_DHK[:, 0 if model.gate == 'shared' else h])


def select_head(vector_HK, h):
    """Select the vector of head h, or the vector that all heads share."""
    return vector_HK[h] if len(vector_HK) > 1 else vector_HK[0]


def convert_to_float64(tree):
    return {
        name: convert_to_float64(leaf) if isinstance(leaf, dict) else np.float64(leaf) for name, leaf in tree.items()
    }


def take_layer_with_first_values(blocks, layer, first_x, model):
    """Return the parameters of a layer, and for a value residual the values of the first layer, of its input."""
    weights = take_layer(blocks, layer)
    if model.value_residual:
        first = take_layer(blocks, 0)
        if model.norm in ('pre', 'sandwich'):
            first_x = compute_norm(first['attention_norms']['before'], first_x, model)
        weights['attention']['first_values'] = [
            project('value', g, first['attention'], first_x) for g in range(model.num_kv_heads)
        ]
    return weights


def take_layer(tree, layer):
    """Return one layer of stacked parameters."""
    return {name: take_layer(leaf, layer) if isinstance(leaf, dict) else leaf[layer] for name, leaf in tree.items()}
