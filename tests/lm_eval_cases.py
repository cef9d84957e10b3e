"""Local tasks of lm-evaluation-harness, and scores of single texts by the formulas."""

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

CHOICE_TASK = dict(
    output_type='multiple_choice',
    doc_to_text='{{question}}',
    doc_to_choice='choices',
    doc_to_target='answer',
    target_delimiter='',
    metric_list=[dict(metric='acc'), dict(metric='acc_norm')],
)
TEXT_TASK = dict(
    output_type='loglikelihood_rolling',
    doc_to_text='',
    doc_to_target='{{text}}',
    metric_list=[dict(metric='byte_perplexity'), dict(metric='bits_per_byte')],
)
TASKS = {'mine_choice': (CHOICE_TASK, QUESTIONS), 'mine_text': (TEXT_TASK, [dict(text=text) for text in TEXTS])}


def write_tasks(folder):
    """Write YAML files of tasks with documents, without local data, and of refused kinds. Return the folder."""
    for name, (task, documents) in TASKS.items():
        file = folder / f'{name}.jsonl'
        file.write_text(''.join(f'{json.dumps(document)}\n' for document in documents))
        dataset_arguments = dict(data_files=dict(test=str(file)), cache_dir=str(folder / 'cache'))
        common = dict(task=name, dataset_path='json', dataset_kwargs=dataset_arguments, test_split='test')
        (folder / f'{name}.yaml').write_text(json.dumps(common | task))  # JSON is YAML
    remote_task = dict(CHOICE_TASK, task='mine_far', dataset_path='nobody/nothing', test_split='test')
    (folder / 'mine_far.yaml').write_text(json.dumps(remote_task))
    generation = dict(output_type='generate_until', doc_to_target='answer', metric_list=[dict(metric='exact_match')])
    refused = dict(
        mine_generation=generation, mine_image=dict(doc_to_image='question'), mine_code=dict(unsafe_code=True)
    )
    choice_file = json.loads((folder / 'mine_choice.yaml').read_text())
    for name, fields in refused.items():
        (folder / f'{name}.yaml').write_text(json.dumps(choice_file | fields | dict(task=name)))
    return folder


def get_prefix_ids(run):
    return [run.spec.data.fixed_token] if run.spec.data.fixed_position else []


def encode_text(run, text):
    return run.tokenizer.encode(text, add_special_tokens=False).ids


def score_last_ids(run, ids, count):
    """Score the last `count` ids.

    Returns:
        (the sum of their log p in float64, whether each is the most likely one).
    """
    logits_TV, _, _ = reference.run_forward(run.params, np.array(ids[:-1]), run.spec)
    logits_TV, target_T = logits_TV[-count:], np.array(ids[-count:])
    highest_T1 = logits_TV.max(-1, keepdims=True)
    log_p_TV = logits_TV - highest_T1 - np.log(np.exp(logits_TV - highest_T1).sum(-1, keepdims=True))
    return log_p_TV[np.arange(count), target_T].sum(), (log_p_TV.argmax(-1) == target_T).all()


def score_continuation(run, context, continuation):
    """Score a continuation of any length in parts that fit in a sequence, and return a pair like `score_last_ids`."""
    prefix_ids, max_ids = get_prefix_ids(run), run.spec.data.length - len(get_prefix_ids(run))
    ids, start_index = encode_text(run, context + continuation), len(encode_text(run, context))
    if not prefix_ids and not start_index:
        ids, start_index = [run.spec.data.end_token, *ids], 1
    results = []
    for start in range(start_index, len(ids), max_ids):
        end = min(start + max_ids, len(ids))
        results.append(score_last_ids(run, [*prefix_ids, *ids[: end - 1][-max_ids:], ids[end - 1]], end - start))
    return sum(score for score, _ in results), all(is_likeliest for _, is_likeliest in results)
