"""Local tasks of lm-evaluation-harness, and what a run says of texts by the formulas, one text at a time."""

import json

import numpy as np
import reference

QUESTIONS = [
    dict(question='abcd ef', choices=[' bca', ' a', ' pon mlk'], answer=1),
    dict(question='nop ', choices=['ab', 'ba ab', 'aa'], answer=0),
    dict(question='a b c d e f g h i j k l m n o p a b c d', choices=[' dea', ' fg hi jk', ' x'], answer=2),
    dict(question='ponm', choices=[' ', ' of', ' ab cd ef gh ij kl mn op ab cd ef gh'], answer=0),
]
TEXTS = ['abc', 'def abc nop ' * 12, 'a b c d e f g h']
CONTEXTS = ['abc de', 'nop abc']

CHOICE = dict(
    output_type='multiple_choice',
    doc_to_text='{{question}}',
    doc_to_choice='choices',
    doc_to_target='answer',
    target_delimiter='',
    metric_list=[dict(metric='acc'), dict(metric='acc_norm')],
)
TEXT = dict(
    output_type='loglikelihood_rolling',
    doc_to_text='',
    doc_to_target='{{text}}',
    metric_list=[dict(metric='byte_perplexity'), dict(metric='bits_per_byte')],
)
ANSWER = dict(
    output_type='generate_until',
    doc_to_text='{{text}}',
    doc_to_target='{{answer}}',
    generation_kwargs=dict(until=['\n'], max_gen_toks=5, do_sample=False),
    metric_list=[dict(metric='exact_match')],
)
TASKS = {
    'mine_choice': (CHOICE, QUESTIONS),
    'mine_text': (TEXT, [dict(text=text) for text in TEXTS]),
    'mine_answer': (ANSWER, [dict(text=text, answer='') for text in CONTEXTS]),
}


def written(folder):
    """The folder, with a YAML file and the documents of each task, and a task whose data are not here."""
    for name, (task, documents) in TASKS.items():
        file = folder / f'{name}.jsonl'
        file.write_text(''.join(f'{json.dumps(document)}\n' for document in documents))
        kept = dict(data_files=dict(test=str(file)), cache_dir=str(folder / 'cache'))
        common = dict(task=name, dataset_path='json', dataset_kwargs=kept, test_split='test')
        (folder / f'{name}.yaml').write_text(json.dumps(common | task))  # JSON is YAML
    far = dict(CHOICE, task='mine_far', dataset_path='nobody/nothing', test_split='test')
    (folder / 'mine_far.yaml').write_text(json.dumps(far))
    return folder


def before(own):
    return [own.spec.data.fixed_token] if own.spec.data.fixed_position else []


def encoded(own, text):
    return own.tokenizer.encode(text, add_special_tokens=False).ids


def scores(own, ids, count):
    """(the sum of log p of so many last ids, in float64, whether all are the likeliest)."""
    logits_TV, _, _ = reference.forward(own.params, np.array(ids[:-1]), own.spec)
    logits_TV, target_T = logits_TV[-count:], np.array(ids[-count:])
    highest_T1 = logits_TV.max(-1, keepdims=True)
    log_p_TV = logits_TV - highest_T1 - np.log(np.exp(logits_TV - highest_T1).sum(-1, keepdims=True))
    return log_p_TV[np.arange(count), target_T].sum(), (log_p_TV.argmax(-1) == target_T).all()


def likelihood(own, context, continuation):
    """The same of a continuation of any length, in parts of as many tokens as are read at once."""
    first, room = before(own), own.spec.data.length - len(before(own))
    ids, begin = encoded(own, context + continuation), len(encoded(own, context))
    if not first and not begin:
        ids, begin = [own.spec.data.end_token, *ids], 1
    found = []
    for start in range(begin, len(ids), room):
        end = min(start + room, len(ids))
        found.append(scores(own, [*first, *ids[: end - 1][-room:], ids[end - 1]], end - start))
    return sum(score for score, _ in found), all(likeliest for _, likeliest in found)


def goes_on(own, context, count):
    """With the likeliest token, again and again."""
    ids, room, found = encoded(own, context), own.spec.data.length - len(before(own)), []
    for _ in range(count):
        logits_TV, _, _ = reference.forward(own.params, np.array([*before(own), *[*ids, *found][-room:]]), own.spec)
        if (chosen := int(logits_TV[-1].argmax())) == own.spec.data.end_token:
            break
        found.append(chosen)
    return own.tokenizer.decode(found, skip_special_tokens=False)
