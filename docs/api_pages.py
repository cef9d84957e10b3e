"""Generator of the pages of docs/reference/api/, which mkdocstrings fills from docstrings.

A page names objects by their path in the code. The page of the package lists every name that `sinklab` exports, so a
new name needs no edit here.
"""

import importlib
import inspect

import sinklab

# {page other than that of the package: (title, purpose, objects)}. A missing object fails the build.
PAGES = {
    'opened.md': (
        'Opened runs and models',
        '`sinklab.open` returns a run or an open model.',
        (
            'sinklab.opened_models.OpenedModel',
            'sinklab.opened_models.OpenedRun',
            'sinklab.opened_models.AttentionMatrices',
        ),
    ),
    'operation.md': (
        'Attention operation',
        'To add one, see [Add an operation](../../guides/add_an_operation.md).',
        (
            'sinklab.attn.operations.Operation',
            'sinklab.attn.operations.Similarity',
            'sinklab.attn.operations.Normalizer',
            'sinklab.attn.operations.RowSums',
            'sinklab.attn.spec.AttentionSpec',
            'sinklab.attn.mask.Mask',
            'sinklab.attn.spec.ScoreBias',
        ),
    ),
    'metric.md': (
        'Metric',
        'To add one, see [Add a metric](../../guides/add_a_metric.md).',
        (
            'sinklab.metrics.metric.Metric',
            'sinklab.metrics.metric.MetricInfo',
            'sinklab.metrics.metric.FigureSpec',
            'sinklab.metrics.metric.make_head_metric',
            'sinklab.metrics.metric.make_row_metric',
            'sinklab.metrics.metric.MetricSetting',
        ),
    ),
    'data_source.md': (
        'Data source',
        '`data.source` names a source of documents.',
        (
            'sinklab.data.sources.open_source',
            'sinklab.data.documents.Source',
            'sinklab.data.documents.Document',
            'sinklab.data.documents.SourcePiece',
        ),
    ),
    'callback.md': (
        'Callback',
        '[Add a callback](../../guides/add_a_callback.md) has an example.',
        (
            'sinklab.train.callbacks.Callback',
            'sinklab.train.callbacks.BestEffortCallback',
            'sinklab.train.callbacks.StateCallback',
        ),
    ),
    'config.md': (
        'Config objects',
        '[Config fields](../config.md) lists the same fields with their defaults.',
        (
            'sinklab.config.validate.parse_config',
            'sinklab.config.spec.Spec',
            'sinklab.config.spec.ModelConfig',
            'sinklab.config.spec.AttentionConfig',
        ),
    ),
}


def build_pages() -> dict[str, str]:
    """Return {name of a page of docs/reference/api/: Markdown}."""
    markdown_by_name = {'sinklab.md': build_package_page()}
    for name, (title, purpose, objects) in PAGES.items():
        for path in objects:
            check_object_exists(path)
        markdown_by_name[name] = f'# {title}\n\n{purpose}\n\n' + ''.join(map(format_directive, objects))
    return markdown_by_name


def build_package_page() -> str:
    """Return the page of the package, with every name that it exports."""
    return (
        '# Python API\n\n'
        'Other pages: '
        + ', '.join(f'[{title}]({name})' for name, (title, _, _) in PAGES.items())
        + '.\n\n'
        + ''.join(format_directive(path, name) for name, path in list_exports().items())
    )


def list_exports() -> dict[str, str]:
    """Return {public name: path of the object} of the package, including names that are imported lazily."""
    paths = {}
    for name in sorted(dir(sinklab), key=lambda name: inspect.isclass(getattr(sinklab, name))):
        value = getattr(sinklab, name)
        is_object = inspect.isroutine(value) or inspect.isclass(value)
        if not name.startswith('_') and is_object and value.__module__.startswith('sinklab'):
            paths[name] = f'{value.__module__}.{value.__qualname__}'
    return paths


def format_directive(path: str, name: str = '') -> str:
    """Return the directive that mkdocstrings replaces with the documentation of an object."""
    heading = f'    options:\n      heading: sinklab.{name}\n      toc_label: {name}\n' if name else ''
    return f'::: {path}\n{heading}\n'


def check_object_exists(path: str) -> None:
    """Raise AttributeError if an object does not exist."""
    module, _, name = path.rpartition('.')
    getattr(importlib.import_module(module), name)
