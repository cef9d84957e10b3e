"""Private names of other packages that sinklab uses: each exists and has the parameters that sinklab expects."""

import importlib
import inspect

import pytest

# (file that uses the name, module:name, parameters; None for what is not called).
PRIVATE_NAMES = [
    ('sinklab/process_group.py', 'jax._src.distributed:global_state.process_id', None),
    ('sinklab/process_group.py', 'jax._src.distributed:global_state.num_processes', None),
    (
        'sinklab/analysis/lm_eval.py',
        'lm_eval.api.model:TemplateLM._loglikelihood_tokens',
        ['self', 'requests', 'kwargs'],
    ),
]


@pytest.mark.parametrize(('file', 'name', 'parameters'), PRIVATE_NAMES, ids=[row[1] for row in PRIVATE_NAMES])
def test_private_name_exists_with_expected_parameters(file, name, parameters):
    module, _, attributes = name.partition(':')
    pytest.importorskip(module.partition('.')[0])
    try:
        value = importlib.import_module(module)
        for attribute in attributes.split('.'):
            value = getattr(value, attribute.removesuffix('()'))
            value = value() if attribute.endswith('()') else value
    except (ImportError, AttributeError) as error:
        pytest.fail(f'{name}, which {file} uses, no longer exists: {error}')
    actual = list(inspect.signature(value).parameters) if parameters else None
    assert actual == parameters, f'the parameters of {name}, which {file} uses, have changed'
