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
from sinklab.observe.harness import Harness
from sinklab.record import Refusal

DRAWS = 1000  # of a bootstrapped standard error
BESIDE = 'sink/1', 'alpha/1', 'valid/loss'  # what the run itself has measured after the same step
AT_ONCE = 8  # texts that an open model reads
LABELS = 'alias', 'name', 'sample_len', 'sample_count', ' '


class Tasks(TaskManager):
    """Says in one line what is wrong with a task."""

    def named(self, wanted: list[str]) -> list[str]:
        for name in wanted:
            if not self.match_tasks([name]):
                near = difflib.get_close_matches(name, self.all_tasks, 3)
                hint = (
                    f'; did you mean {" or ".join(near)}?' if near else '; give --include=DIR of its YAML file, too'
                )
                raise Refusal(f'--tasks={name} is no task of lm-evaluation-harness{hint}')
        return self.match_tasks(wanted)

    def load(self, task_list: Any) -> Any:
        try:
            loaded = super().load(task_list)
        except Exception as error:  # of a network, of files, of a YAML file: told in its words
            said = f'{type(error).__name__}: {" ".join(str(error).split())[:300]}'
            raise Refusal(
                f'{", ".join(map(str, task_list))} cannot be loaded ({said}); tasks have their data from the Hugging '
                'Face hub, or from the files that their YAML file names'
            ) from error
        for name, task in loaded['tasks'].items():
            if getattr(task, 'UNSAFE_CODE', False) or getattr(task, 'MULTIMODAL', False):
                raise Refusal(f'{name} runs code that a model writes, or is not of text alone; leave it out')
        return loaded


def tasks(wanted: list[str], include: str | None) -> Tasks:
    """Your own alone where no more is wanted: to read the thousands of files of the library takes its time."""
    own = Tasks(include_path=include, include_defaults=False)
    return own if {*wanted} <= {*own.all_subtasks} else Tasks(include_path=include)


def model(given: str) -> LM:
    """A step of a run, or hf:PATH_OR_ID as lm-evaluation-harness reads it."""
    if not given.startswith(opening.OPEN):
        return Harness(opening.subject(given))
    folder = hub.folder_of(given.removeprefix(opening.OPEN))
    try:
        import torch
        from lm_eval.models.huggingface import HFLM
    except ImportError as error:
        raise Refusal(f'{given} needs {error.name}; install it: {format_package_command("lm-eval[hf]")}') from error
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    with contextlib.redirect_stdout(sys.stderr):
        return HFLM(pretrained=str(folder), device=device, batch_size=AT_ONCE)


def evaluated(
    given: str, wanted: list[str], include: str | None = None, limit: int | None = None, few_shot: int | None = None
) -> dict[str, Any]:
    """All numbers by tasks and groups of tasks, with lm-evaluation-harness's own names of them."""
    os.environ['DISABLE_MULTIPROC'] = '1'  # else it forks a process that has threads
    asked, manager = model(given), tasks(wanted, include)
    names = manager.named(wanted)
    with contextlib.redirect_stdout(sys.stderr):
        found = lm_eval.simple_evaluate(
            asked,
            tasks=names,
            task_manager=manager,
            limit=limit,
            num_fewshot=few_shot,
            log_samples=False,
            bootstrap_iters=DRAWS,
        )
    what = dict(model=given) if not isinstance(asked, Harness) else of_run(asked)
    told = {name: of_task(name, found) for name in {**found['results'], **found.get('groups', {})}}
    return dict(**what, lm_eval=version('lm_eval'), limit=limit, tasks=told)


def of_run(asked: Harness) -> dict[str, Any]:
    own = asked.own
    measured = next((record for record in own.folder.records() if record['step'] == own.step), {})
    beside = {name: measured[name] for name in BESIDE if name in measured}
    return dict(model=own.name, digest=own.digest, measured=beside)


def of_task(name: str, found: dict) -> dict[str, Any]:
    numbers = {**found['results'], **found.get('groups', {})}[name]
    return dict(
        version=found['versions'].get(name),
        few_shot=found['n-shot'].get(name),
        samples=found['n-samples'].get(name, {}).get('effective'),
        numbers={
            key: value for key, value in numbers.items() if isinstance(value, int | float) and key not in LABELS
        },
    )
