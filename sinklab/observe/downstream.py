"""Tasks of lm-evaluation-harness, on a step of a run or on an open model."""

import contextlib
import difflib
import os
import sys
from importlib.metadata import version
from typing import Any

import lm_eval
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

from sinklab.install import format_package_command
from sinklab.observe import hub, opening
from sinklab.observe.harness import SinklabLM
from sinklab.record import UserError

BOOTSTRAP_ITERATIONS = 1000  # of a bootstrapped standard error
RUN_METRIC_NAMES = 'sink/1', 'alpha/1', 'valid/loss'  # what the run itself has measured after the same step
HF_BATCH_SIZE = 8  # texts that an open model reads
NON_METRIC_KEYS = 'alias', 'name', 'sample_len', 'sample_count', ' '


class CheckedTaskManager(TaskManager):
    """Says in one line what is wrong with a task."""

    def match_names(self, task_names: list[str]) -> list[str]:
        for name in task_names:
            if not self.match_tasks([name]):
                suggestions = difflib.get_close_matches(name, self.all_tasks, 3)
                hint = (
                    f'; did you mean {" or ".join(suggestions)}?' if suggestions else '; give --include=DIR of its YAML file, too'
                )
                raise UserError(f'--tasks={name} is no task of lm-evaluation-harness{hint}')
        return self.match_tasks(task_names)

    def load(self, task_list: Any) -> Any:
        try:
            loaded = super().load(task_list)
        except Exception as error:  # of a network, of files, of a YAML file: told in its words
            message = f'{type(error).__name__}: {" ".join(str(error).split())[:300]}'
            raise UserError(
                f'{", ".join(map(str, task_list))} cannot be loaded ({message}); tasks have their data from the Hugging '
                'Face hub, or from the files that their YAML file names'
            ) from error
        for name, task in loaded['tasks'].items():
            if getattr(task, 'UNSAFE_CODE', False) or getattr(task, 'MULTIMODAL', False):
                raise UserError(f'{name} runs code that a model writes, or is not of text alone; leave it out')
        return loaded


def load_task_manager(task_names: list[str], include_dir: str | None) -> CheckedTaskManager:
    """Your own alone where no more is wanted: to read the thousands of files of the library takes its time."""
    manager = CheckedTaskManager(include_path=include_dir, include_defaults=False)
    return manager if {*task_names} <= {*manager.all_subtasks} else CheckedTaskManager(include_path=include_dir)


def load_lm(model_ref: str) -> LM:
    """A step of a run, or hf:PATH_OR_ID as lm-evaluation-harness reads it."""
    if not model_ref.startswith(opening.HF_PREFIX):
        return SinklabLM(opening.open_model(model_ref))
    model_dir = hub.find_model_dir(model_ref.removeprefix(opening.HF_PREFIX))
    try:
        import torch
        from lm_eval.models.huggingface import HFLM
    except ImportError as error:
        raise UserError(f'{model_ref} needs {error.name}; install it: {format_package_command("lm-eval[hf]")}') from error
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    with contextlib.redirect_stdout(sys.stderr):
        return HFLM(pretrained=str(model_dir), device=device, batch_size=HF_BATCH_SIZE)


def evaluate_tasks(
    model_ref: str, task_names: list[str], include_dir: str | None = None, limit: int | None = None, few_shot: int | None = None
) -> dict[str, Any]:
    """All numbers by tasks and groups of tasks, with lm-evaluation-harness's own names of them."""
    os.environ['DISABLE_MULTIPROC'] = '1'  # else it forks a process that has threads
    lm, manager = load_lm(model_ref), load_task_manager(task_names, include_dir)
    matched_names = manager.match_names(task_names)
    with contextlib.redirect_stdout(sys.stderr):
        results = lm_eval.simple_evaluate(
            lm,
            tasks=matched_names,
            task_manager=manager,
            limit=limit,
            num_fewshot=few_shot,
            log_samples=False,
            bootstrap_iters=BOOTSTRAP_ITERATIONS,
        )
    header = dict(model=model_ref) if not isinstance(lm, SinklabLM) else describe_checkpoint(lm)
    summaries = {name: summarize_task(name, results) for name in {**results['results'], **results.get('groups', {})}}
    return dict(**header, lm_eval=version('lm_eval'), limit=limit, tasks=summaries)


def describe_checkpoint(lm: SinklabLM) -> dict[str, Any]:
    run_model = lm.own
    last_record = next((record for record in run_model.folder.records() if record['step'] == run_model.step), {})
    metrics = {name: last_record[name] for name in RUN_METRIC_NAMES if name in last_record}
    return dict(model=run_model.name, digest=run_model.digest, measured=metrics)


def summarize_task(name: str, results: dict) -> dict[str, Any]:
    numbers = {**results['results'], **results.get('groups', {})}[name]
    return dict(
        version=results['versions'].get(name),
        few_shot=results['n-shot'].get(name),
        samples=results['n-samples'].get(name, {}).get('effective'),
        numbers={
            key: value for key, value in numbers.items() if isinstance(value, int | float) and key not in NON_METRIC_KEYS
        },
    )
