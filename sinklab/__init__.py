"""Train language models, watch attention sinks emerge, and find out why.

The public Python API is `sinklab.open`, `sinklab.Edit`, `sinklab.attention`, and the exception `sinklab.UserError`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from sinklab import xla_faults

xla_faults.disable_faulty_fusions()  # before any module of sinklab lets jax start

if TYPE_CHECKING:
    from sinklab.analysis.edits import Edit as Edit
    from sinklab.api import OpenedModel, OpenedRun
    from sinklab.attn.function import attention as attention
    from sinklab.errors import UserError as UserError

__version__ = '0.2.0'

# Imported when they are first used: jax takes a second, and `import sinklab` must not.
LAZY_IMPORTS = {
    'attention': 'sinklab.attn.function',
    'Edit': 'sinklab.analysis.edits',
    'UserError': 'sinklab.errors',
}


def open(model_ref: str, *, bos: str = 'auto', dtype: str | None = None) -> 'OpenedRun | OpenedModel':
    """Open a run or a model of transformers, to look at its attention and to measure it; nothing is written.

    Args:
        model_ref: The folder of a run (its newest whole checkpoint is taken), `RUN@STEP`, `hf:` with the folder or
            the name of a model of transformers, or `gguf:` with a GGUF file. A run may also lie in a bucket, and may
            still be training.
        bos: What a text begins with. `auto`: what training or the model's tokenizer puts there; `none`: the text
            itself; `force`: BOS.
        dtype: The dtype to compute in, `float32` or `bfloat16`; None: that of the run's config, or float32 for a
            model of transformers.

    Returns:
        An `OpenedRun`, or an `OpenedModel` for `hf:` and `gguf:`. Both have `.attention(text)`,
        `.measure(name, text)`, `.loss(text)`, `.compare(text, edits)`, `.logits(text)`, `.cache(text)`, `.model`,
        `.tokenizer` and further functions (docs/tutorials/interventions.md); a run also has `.steps`, `.at(step)`,
        `.curve(name)`, `.params(step)` and `.spec`. Parameters are read when they are first needed.

    Raises:
        UserError: There is no such run, step or model, or a package that it needs is not installed.
    """
    from sinklab import api

    return api.open(model_ref, bos=bos, dtype=dtype)


def __dir__() -> list[str]:
    return [*globals(), *LAZY_IMPORTS]


def __getattr__(name: str) -> Any:
    if name not in LAZY_IMPORTS:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    return getattr(importlib.import_module(LAZY_IMPORTS[name]), name)
