"""Tests of logits, patching, logit lens and attribution of open models against transformers with plain hooks."""

import contextlib

import numpy as np
import open_models
import pytest

pytest.importorskip('torch', reason='open models need torch, which has no wheel here')
pytest.importorskip('transformers', reason='open models need transformers')

import torch

import sinklab
from sinklab import Edit, UserError

pytestmark = pytest.mark.slow  # transformers takes seconds to import
IDS_PT, OTHER_PT = np.random.default_rng(0).integers(2, open_models.VOCABULARY, (2, 2, 12))
LAYER, POSITION, HEAD, TOKEN, OTHER_TOKEN = 1, 5, 2, 7, 9


class HookedModel:
    """A tiny model of transformers, and the modules at which hooks are set."""

    def __init__(self, family, folder):
        self.hf = open_models.save_model(
            open_models.make_configs()[family], folder, open_models.make_tokenizer_json()
        )
        self.opened = sinklab.open(f'hf:{folder}')
        if family == 'llama':
            self.layers, self.norm = self.hf.model.layers, self.hf.model.norm
            self.projections = [layer.self_attn.o_proj for layer in self.layers]
            self.values = [layer.self_attn.v_proj for layer in self.layers]
            self.output_HKD = [module.weight.T for module in self.projections]
        else:
            self.layers, self.norm = self.hf.transformer.h, self.hf.transformer.ln_f
            self.projections = [layer.attn.c_proj for layer in self.layers]
            self.values = [layer.attn.c_attn for layer in self.layers]  # the last third of its outputs
            self.output_HKD = [module.weight for module in self.projections]
        self.heads = self.hf.config.num_attention_heads
        self.width = self.hf.config.hidden_size // self.heads

    def run(self, ids_PT, *hooks):
        """Return the outputs of transformers with hooks (name of the method that registers it, module, function)."""
        with contextlib.ExitStack() as stack, torch.no_grad():
            for method, module, hook in hooks:
                stack.callback(getattr(module, method)(hook).remove)
            ids = torch.as_tensor(ids_PT)
            return self.hf(ids, output_hidden_states=True, output_attentions=True, use_cache=False)

    def record(self, ids_PT, method, modules):
        """Return the inputs (register_forward_pre_hook) or outputs (register_forward_hook) of modules."""
        records = []

        def hook(module, *args):
            array = args[-1][0] if isinstance(args[-1], tuple) else args[-1]
            records.append(array.clone())

        self.run(ids_PT, *((method, module, hook) for module in modules))
        return records


@pytest.fixture(scope='module', params=['llama', 'gpt2'])
def model(request, tmp_path_factory):
    return HookedModel(request.param, tmp_path_factory.mktemp(request.param))


def replace_output(array_PTD):
    """Return a hook that replaces the output of a module at POSITION."""

    def hook(module, args, output):
        output = output[0] if isinstance(output, tuple) else output
        output[:, POSITION] = array_PTD[:, POSITION]

    return hook


def make_head_hook(array_PTK, model, positions=slice(None)):
    """Return a hook that replaces the part of HEAD in the input of an output projection."""

    def hook(module, args):
        args[0][:, positions, HEAD * model.width : (HEAD + 1) * model.width] = array_PTK[:, positions]

    return hook


def split_head(array, model):
    return array[..., HEAD * model.width : (HEAD + 1) * model.width]


def test_patched_activations_give_logits_of_hooked_transformers(model):
    cache, layer = model.opened.cache(OTHER_PT), model.layers[LAYER]
    pre_hook, post_hook, projection = 'register_forward_pre_hook', 'register_forward_hook', model.projections[LAYER]
    (residual,), (ffn,) = (model.record(OTHER_PT, post_hook, [module]) for module in (layer, layer.mlp))
    head = split_head(model.record(OTHER_PT, pre_hook, [projection])[0], model)
    pattern_PTS = model.run(OTHER_PT).attentions[LAYER][:, HEAD]
    value = model.record(IDS_PT, post_hook, [model.values[LAYER]])[0]
    kv_heads = getattr(model.hf.config, 'num_key_value_heads', model.heads)
    first = value.shape[-1] - kv_heads * model.width + HEAD * kv_heads // model.heads * model.width
    mixed = pattern_PTS @ value[..., first : first + model.width]
    own_head = split_head(model.record(IDS_PT, pre_hook, [projection])[0], model)
    place = dict(layers=LAYER, heads=HEAD)
    cases = {
        'residual': (
            Edit('residual', POSITION, cache['residual'], LAYER),
            (post_hook, layer, replace_output(residual)),
        ),
        'ffn': (Edit('ffn', POSITION, cache['ffn'], LAYER), (post_hook, layer.mlp, replace_output(ffn))),
        'head': (
            Edit('head', POSITION, cache['head'], **place),
            (pre_hook, projection, make_head_hook(head, model, POSITION)),
        ),
        'attention': (
            Edit('attention', None, cache['attention'], **place),
            (pre_hook, projection, make_head_hook(mixed, model)),
        ),
        'head 0': (
            Edit('head', value=0, **place),
            (pre_hook, projection, make_head_hook(torch.zeros_like(head), model)),
        ),
        'head mean': (
            Edit('head', value='mean', **place),
            (pre_hook, projection, make_head_hook(own_head.mean(1, keepdim=True).expand_as(head), model)),
        ),
    }
    plain = model.opened.logits(IDS_PT)
    np.testing.assert_allclose(plain, model.run(IDS_PT).logits, atol=1e-6)
    for name, (edit, hook) in cases.items():
        actual = model.opened.logits(IDS_PT, edit)
        np.testing.assert_allclose(actual, model.run(IDS_PT, hook).logits, atol=1e-5, err_msg=name)
        assert np.abs(actual - plain).max() > 1e-4, name


def test_sweep_scores_each_layer_and_position(model):
    edit = Edit('residual', value=model.opened.cache(OTHER_PT)['residual'])
    actual = model.opened.sweep_edit(IDS_PT, edit, lambda logits: logits[0, -1, TOKEN])
    residuals = model.record(OTHER_PT, 'register_forward_hook', model.layers)
    assert actual.shape == (len(model.layers), IDS_PT.shape[1])
    for index, layer in enumerate(model.layers):
        logits = model.run(IDS_PT, ('register_forward_hook', layer, replace_output(residuals[index]))).logits
        assert actual[index, POSITION] == pytest.approx(logits[0, -1, TOKEN].item(), abs=1e-5)
    losses = model.opened.sweep_edit(IDS_PT, Edit('head'), over=('layers', 'heads'))
    assert losses[LAYER, HEAD] == model.opened.loss(IDS_PT, Edit('head', layers=LAYER, heads=HEAD))


def test_logit_lens_is_final_norm_and_head_of_hidden_states(model):
    hidden_states = model.record(IDS_PT, 'register_forward_hook', model.layers)
    with torch.no_grad():
        expected = [model.hf.lm_head(model.norm(hidden)).numpy() for hidden in hidden_states]
    np.testing.assert_allclose(model.opened.logit_lens(IDS_PT), expected, atol=1e-5)


def test_attribution_is_each_part_through_the_frozen_norm_and_sums_to_the_logit(model):
    parts = model.opened.attribute_logits(IDS_PT, TOKEN, OTHER_TOKEN)
    inputs = model.record(IDS_PT, 'register_forward_pre_hook', model.projections)
    ffns = model.record(IDS_PT, 'register_forward_hook', [layer.mlp for layer in model.layers])
    final = model.record(IDS_PT, 'register_forward_hook', [model.layers[-1]])[0].double()
    with torch.no_grad():
        direction = (model.hf.lm_head.weight[TOKEN] - model.hf.lm_head.weight[OTHER_TOKEN]).double()
        is_centered = isinstance(model.norm, torch.nn.LayerNorm)
        epsilon = model.norm.eps if is_centered else model.norm.variance_epsilon

        def center(array):
            return array - array.mean(-1, keepdim=True) if is_centered else array

        scale = (center(final).square().mean(-1, keepdim=True) + epsilon).rsqrt() * model.norm.weight
        for index, (head_input, ffn) in enumerate(zip(inputs, ffns, strict=True)):
            rows = slice(HEAD * model.width, (HEAD + 1) * model.width)
            head = (head_input[..., rows] @ model.output_HKD[index][rows]).double()
            for part, actual in ((head, parts['head'][index, ..., HEAD]), (ffn.double(), parts['ffn'][index])):
                np.testing.assert_allclose(actual, (center(part) * scale) @ direction, atol=1e-5)
    logits = model.run(IDS_PT).logits
    total = parts['head'].sum((0, 3)) + parts['ffn'].sum(0) + parts['rest']
    np.testing.assert_allclose(total, logits[..., TOKEN] - logits[..., OTHER_TOKEN], atol=1e-5)


def test_losses_and_top_tokens_are_those_of_transformers(model):
    logits = model.run(IDS_PT).logits
    expected = torch.nn.functional.cross_entropy(
        logits[:, :-1].transpose(1, 2), torch.as_tensor(IDS_PT[:, 1:]), reduction='none'
    )
    np.testing.assert_allclose(model.opened.token_losses(IDS_PT), expected, atol=1e-5)
    top = logits[0, -1].softmax(-1).topk(3)
    tokens, probabilities = zip(*model.opened.top_tokens(IDS_PT[0], 3), strict=True)
    assert tokens == tuple(model.opened.tokenizer.decode([index]) for index in top.indices)
    np.testing.assert_allclose(probabilities, top.values, rtol=1e-5)


def test_steered_generation_is_that_of_hooked_transformers(model):
    direction = 0.5 * np.random.default_rng(0).normal(size=model.hf.config.hidden_size).astype(np.float32)
    steer = Edit('residual', None, lambda hidden: hidden + direction, LAYER)

    def hook(module, args, output):
        return output + torch.as_tensor(direction)

    expected = model.hf.generate(torch.as_tensor(IDS_PT[:1]), max_new_tokens=6, do_sample=False, eos_token_id=None)
    with contextlib.ExitStack() as stack:
        stack.callback(model.layers[LAYER].register_forward_hook(hook).remove)
        steered = model.hf.generate(torch.as_tensor(IDS_PT[:1]), max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert (steered != expected).any()
    for edit, ids in ((None, expected), (steer, steered)):
        np.testing.assert_array_equal(model.opened.generate(IDS_PT[0], 6, edit), ids)


def test_cache_is_written_as_safetensors(model, tmp_path):
    from safetensors.numpy import load_file, save_file

    cache = model.opened.cache(IDS_PT)
    save_file(cache, tmp_path / 'cache.safetensors')
    for name, array in load_file(tmp_path / 'cache.safetensors').items():
        np.testing.assert_array_equal(array, cache[name], err_msg=name)


def test_attribution_refuses_softcapped_logits(tmp_path):
    from benchmarks import open_families

    open_families.save_model(open_families.make_config('gemma2'), tmp_path)
    opened = sinklab.open(f'hf:{tmp_path}')
    opened.subject.config.final_logit_softcapping = 0.1
    with pytest.raises(UserError):
        opened.attribute_logits(IDS_PT, TOKEN)
