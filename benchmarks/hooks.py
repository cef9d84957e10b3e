"""Compare tasks of `sinklab.open` with the same in transformers and plain hooks: results, lines of code and seconds.

    python benchmarks/fetch_models.py build/models
    python -m benchmarks.hooks --model=build/models/SmolLM2-135M-Instruct.Q4_1.gguf

Each function of HOOKS does the task of the same name in TASKS, with PyTorch alone, for a model of the LLaMA family.
Both return the same array up to rounding. Lines are those of the body of a function.
"""

import argparse
import contextlib
import inspect
from pathlib import Path

import numpy as np
import torch

import sinklab
from benchmarks.argument_types import parse_count
from benchmarks.machine import describe_machine
from benchmarks.timing import format_spread, time_in_turns
from sinklab import Edit
from sinklab.environment import get_package_versions

TEXT, OTHER_TEXT = 'The capital of France is', 'The capital of Italy is'
POSITION, LAYER, HEAD, NUM_TOKENS, STRENGTH = 3, 10, 2, 10, 4.0


@contextlib.contextmanager
def set_hooks(*hooks):
    """Set hooks (name of the method that registers it, module, function) within this context."""
    with contextlib.ExitStack() as stack, torch.no_grad():
        for method, module, function in hooks:
            stack.callback(getattr(module, method)(function).remove)
        yield


def open_top_tokens(opened):
    return [weight for _, weight in opened.top_tokens(TEXT, 5)]


def hook_top_tokens(model, tokenizer):
    ids = tokenizer(TEXT, return_tensors='pt').input_ids
    with torch.no_grad():
        return model(ids).logits[0, -1].softmax(-1).topk(5).values


def open_token_losses(opened):
    return opened.token_losses(TEXT)


def hook_token_losses(model, tokenizer):
    ids = tokenizer(TEXT, return_tensors='pt').input_ids
    with torch.no_grad():
        logits = model(ids).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.mT, ids[:, 1:], reduction='none')


def open_attention(opened):
    return opened.attention(TEXT).matrix_LHTS


def hook_attention(model, tokenizer):
    ids = tokenizer(TEXT, return_tensors='pt').input_ids
    with torch.no_grad():
        return torch.stack(model(ids, output_attentions=True).attentions)[:, 0]


def open_logit_lens(opened):
    return opened.logit_lens(TEXT)


def hook_logit_lens(model, tokenizer):
    ids, hidden = tokenizer(TEXT, return_tensors='pt').input_ids, []
    save = [('register_forward_hook', layer, lambda *args: hidden.append(args[2])) for layer in model.model.layers]
    with set_hooks(*save):
        model(ids)
        return model.lm_head(model.model.norm(torch.stack(hidden)))


def open_ablated_loss(opened):
    return opened.loss(TEXT, Edit('head', layers=LAYER, heads=HEAD))


def hook_ablated_loss(model, tokenizer):
    ids = tokenizer(TEXT, return_tensors='pt').input_ids
    width = model.config.head_dim

    def ablate(module, args):
        args[0][..., HEAD * width : (HEAD + 1) * width] = 0

    with set_hooks(('register_forward_pre_hook', model.model.layers[LAYER].self_attn.o_proj, ablate)):
        return model(ids, labels=ids).loss


def open_patching(opened):
    clean, other = opened.ids([TEXT, OTHER_TEXT])
    patch = Edit('residual', positions=POSITION, value=opened.cache(clean)['residual'])
    return opened.sweep_edit(other, patch, lambda logits: logits[0, -1].max(), over=('layers',))


def hook_patching(model, tokenizer):
    clean, other = tokenizer([TEXT, OTHER_TEXT], return_tensors='pt').input_ids[:, None]
    hidden = []
    save = [('register_forward_hook', layer, lambda *args: hidden.append(args[2])) for layer in model.model.layers]
    with set_hooks(*save):
        model(clean)
    scores = []
    for layer, module in enumerate(model.model.layers):

        def patch(module, args, output, layer=layer):
            output[:, POSITION] = hidden[layer][:, POSITION]

        with set_hooks(('register_forward_hook', module, patch)):
            scores.append(model(other).logits[0, -1].max())
    return scores


def open_steering(opened):
    direction = opened.cache(TEXT)['residual'][LAYER, 0, -1]
    steer = Edit('residual', None, lambda hidden: hidden + STRENGTH * direction / np.linalg.norm(direction), LAYER)
    return opened.generate(TEXT, NUM_TOKENS, steer)[0]


def hook_steering(model, tokenizer):
    inputs, hidden = tokenizer(TEXT, return_tensors='pt'), []
    layer = model.model.layers[LAYER]
    with set_hooks(('register_forward_hook', layer, lambda *args: hidden.append(args[2][0, -1]))):
        model(**inputs)
    step = STRENGTH * hidden[0] / hidden[0].norm()
    with set_hooks(('register_forward_hook', layer, lambda module, args, output: output + step)):
        ids = model.generate(**inputs, max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None)
    return ids[0]


TASKS = {name.removeprefix('open_'): task for name, task in [*globals().items()] if name.startswith('open_')}
HOOKS = {name.removeprefix('hook_'): task for name, task in [*globals().items()] if name.startswith('hook_')}


def count_lines(function) -> int:
    """Count the lines of a function after its first line, without empty ones."""
    return sum(bool(line.strip()) for line in inspect.getsource(function).splitlines()[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--model', type=Path, required=True, help='a GGUF file of the LLaMA family')
    parser.add_argument('--rounds', type=parse_count, default=5)
    args = parser.parse_args()
    opened = sinklab.open(f'gguf:{args.model}')
    model, tokenizer = opened.model, opened.tokenizer
    versions = get_package_versions(('torch', 'transformers', 'numpy'))
    print(describe_machine(), *(f'{name} {version}' for name, version in versions.items()), sep=', ')
    for name, task in TASKS.items():
        functions = {
            'sinklab': lambda task=task: task(opened),
            'hooks': lambda name=name: HOOKS[name](model, tokenizer),
        }
        actual, expected = (np.asarray(function(), float) for function in functions.values())
        difference = np.abs(actual - expected).max() / np.abs(expected).max()
        seconds = time_in_turns(functions, args.rounds)
        ratios = [ours / theirs for ours, theirs in zip(*seconds.values(), strict=True)]
        lines = f'{count_lines(task)} and {count_lines(HOOKS[name])} lines'
        times = ', '.join(f'{name} {format_spread(values)} s' for name, values in seconds.items())
        print(f'{name}: {lines}; {times}; ratio {format_spread(ratios)}; relative difference {difference:.1e}')


if __name__ == '__main__':
    main()
