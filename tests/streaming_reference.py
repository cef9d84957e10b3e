"""A cache of x first and y recent tokens by its definition: the model of reference.py, at every step on what is kept.

What a layer keeps of a token is here what goes into it, of which keys and values are made anew at every step.
"""

import formulas
import numpy as np
import reference


def logits(params, token_T, spec, first, recent):
    """logits_TV of each token, in float64."""
    model, params = spec.model, reference.double(params)
    embedded = params['embedding_VD'][token_T]
    sinks = int(model.columns.kind == 'sink_token')
    if sinks:
        embedded = np.concatenate([params['sink']['vector_TD'], embedded])
    kept, said = [[] for _ in range(model.layers)], []
    for time, x in enumerate(embedded):
        x = x + embedding(params, model, min(time, first + recent))
        for layer, seen in enumerate(kept):
            seen.append((time, x))
            place = placed(params, spec, [time for time, _ in seen])
            rows = np.stack([row for _, row in seen])
            x = reference.block(reference.take(params['blocks'], layer), rows, place, spec)[0][-1]
            kept[layer] = seen[:first] + seen[first:][-recent:]
        if model.norm != 'post':
            x = formulas.rms_norm(x, params['norm']['gain_D'], model.norm_epsilon)
        said.append(x @ params['embedding_VD' if model.tied else 'head_VD'].T)
    return np.stack(said[sinks:])


def embedding(params, model, position):
    if model.position == 'absolute':
        return formulas.sinusoids([position], model.width)[0]
    return params['position']['table_TD'][position] if model.position == 'learned' else 0.0


def placed(params, spec, times):
    """Positions in the cache, and who sees whom there: a window counts them; a sink token is in all windows."""
    model, position_T = spec.model, np.arange(len(times))
    has_sink = model.columns.kind == 'sink_token' and times[0] == 0
    text = len(times) - has_sink
    visible_TS = formulas.visible(text, model.mask, np.zeros(text))
    if has_sink:
        visible_TS = np.insert(visible_TS, 0, False, axis=0)
    if has_sink or model.columns.kind in ('k', 'kv', 'logit'):
        visible_TS = np.insert(visible_TS, 0, True, axis=1)
    table_RH = params['position']['table_RH'] if model.position == 'relative_t5' else None
    return reference.Place(
        position_T, formulas.position_bias(model.position, position_T, model.heads, table_RH), visible_TS
    )


def perplexity(logits_TV, target_T):
    """exp of the mean of -log softmax(logits)[target]."""
    loss_T = [formulas.logsumexp(row) - row[target] for row, target in zip(logits_TV, target_T, strict=True)]
    return np.exp(np.mean(loss_T))
