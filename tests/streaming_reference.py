"""Cache of the first x and the y most recent tokens, computed by its definition with the model of reference.py.

Here a layer caches its inputs, and computes their keys and values again at every step.
"""

import formulas
import numpy as np
import reference


def compute_logits(params, token_T, spec, num_first, num_recent):
    """Compute logits_TV of all tokens in float64."""
    model, params = spec.model, reference.convert_to_float64(params)
    embedded = reference.embed(params, model, token_T)
    sinks = int(model.learned_kv.kind == 'sink_token')
    if sinks:
        embedded = np.concatenate([params['sink']['vector_TD'], embedded])
    caches, outputs, first_rows = [[] for _ in range(model.layers)], [], []
    for index, x in enumerate(embedded):
        x = x + compute_position_embedding(params, model, min(index, num_first + num_recent))
        first_rows.append(x)
        for layer, cache in enumerate(caches):
            cache.append((index, x))
            layer_spec = reference.make_layer_spec(spec, layer)
            position_info = make_position_info(params, layer_spec, [index for index, _ in cache])
            rows = np.stack([row for _, row in cache])
            first_x = np.stack([first_rows[index] for index, _ in cache])
            weights = reference.take_layer_with_first_values(params['blocks'], layer, first_x, model)
            x = reference.compute_block(weights, rows, position_info, layer_spec)[0][-1]
            caches[layer] = cache[:num_first] + cache[max(num_first, len(cache) - num_recent) :]
        if model.norm != 'post':
            x = reference.compute_norm(params['norm'], x, model)
        outputs.append(x @ params['embedding_VD' if model.tied else 'head_VD'].T)
    return np.stack(outputs[sinks:])


def compute_position_embedding(params, model, position):
    if model.position == 'absolute':
        return formulas.compute_sinusoids([position], model.width)[0]
    return params['position']['table_TD'][position] if model.position == 'learned' else 0.0


def make_position_info(params, spec, indices):
    """Return the positions and the visible keys of the tokens in the cache.

    A window counts positions in the cache. A sink token is in all windows.
    """
    model, position_T = spec.model, np.arange(len(indices))
    has_sink = model.learned_kv.kind == 'sink_token' and indices[0] == 0
    num_text_tokens = len(indices) - has_sink
    visible_TS = formulas.compute_visibility(num_text_tokens, model.mask, np.zeros(num_text_tokens))
    if has_sink:
        visible_TS = np.insert(visible_TS, 0, False, axis=0)
    if has_sink or model.learned_kv.kind in ('k', 'kv', 'logit'):
        visible_TS = np.insert(visible_TS, 0, True, axis=1)
    table_RH = params['position']['table_RH'] if model.position == 'relative_t5' else None
    return reference.PositionInfo(
        position_T, formulas.compute_position_bias(model.position, position_T, model.heads, table_RH), visible_TS
    )


def compute_perplexity(logits_TV, target_T):
    """Compute exp of the mean of -log softmax(logits)[target]."""
    loss_T = [formulas.logsumexp(row) - row[target] for row, target in zip(logits_TV, target_T, strict=True)]
    return np.exp(np.mean(loss_T))
