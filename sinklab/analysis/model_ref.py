"""Resolution of model references: RUN[@STEP], hf:PATH_OR_ID or gguf:PATH to a measurable model."""

from collections.abc import Iterator
from typing import get_args

from sinklab.analysis.bos import BosMode, check_bos
from sinklab.analysis.model_protocol import MeasurableModel
from sinklab.analysis.run_model import RunModel
from sinklab.checkpoint import digests
from sinklab.config.spec import DtypeName
from sinklab.errors import UserError, format_extra_command
from sinklab.hf import gguf
from sinklab.run_dir import MODEL_PREFIXES, RunDir, check_has_run, parse_run_ref, select_steps


def open_model(model_ref: str, bos: BosMode = 'auto', dtype: str | None = None) -> MeasurableModel:
    """Open a checkpoint of a run (the newest complete one if no step is given), hf:PATH_OR_ID or gguf:PATH.

    It computes in `dtype`; None: that of the run's config, or float32 for an open model.
    """
    check_bos(bos)
    if dtype not in (None, *get_args(DtypeName)):
        raise UserError(f'dtype={dtype} is not allowed; give {" or ".join(get_args(DtypeName))}')
    if model_ref.startswith(MODEL_PREFIXES):
        model_dir = gguf.find_model_dir(model_ref)  # before torch is loaded
        try:
            from sinklab.analysis.hf_model import DEFAULT_DTYPE, HFModel
        except ImportError as error:
            raise UserError(f'{model_ref} needs {error.name}; install it: {format_extra_command("hf")}') from error
        return HFModel(model_dir, bos, model_ref, dtype or DEFAULT_DTYPE)
    return RunModel(*resolve_checkpoint(model_ref), bos, dtype)


def open_all_checkpoints(run_ref: str, bos: BosMode = 'auto', dtype: str | None = None) -> Iterator[MeasurableModel]:
    """Yield a model for each checkpoint of a run; each is opened when it is reached."""
    run_dir, step = resolve_run(run_ref)
    if step is not None:
        raise UserError(f'--all measures all steps, but {run_ref} is one step; give {run_dir}')
    return (RunModel(run_dir, saved_step, bos, dtype) for saved_step in select_steps(run_dir, step))


def resolve_checkpoint(run_ref: str) -> tuple[RunDir, int]:
    """Return the run directory and the step of RUN@STEP; of RUN, the newest complete step."""
    run_dir, step = resolve_run(run_ref)
    return run_dir, digests.select_checkpoint(run_dir, step)


def resolve_run(run_ref: str) -> tuple[RunDir, int | None]:
    """Return the run directory of RUN[@STEP], and the step or None.

    Raises:
        UserError: There is no run of sinklab.
    """
    run_dir, step = parse_run_ref(run_ref)
    check_has_run(run_dir)
    return run_dir, step
