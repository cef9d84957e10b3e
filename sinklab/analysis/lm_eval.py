"""Tasks of lm-evaluation-harness on a checkpoint of a run."""

import contextlib
import os
import sys
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import lm_eval
import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager

from sinklab.analysis.model_ref import resolve_checkpoint
from sinklab.analysis.run_model import RunModel
from sinklab.config.spec import Spec
from sinklab.errors import UserError, format_error, format_unknown_name

MIN_LENGTH = 32  # shorter texts are padded to this length
BOOTSTRAP_ITERATIONS = 1000  # for the bootstrapped standard error
NON_METRIC_KEYS = 'alias', 'name', 'sample_len', 'sample_count', ' '


class SinklabLM(TemplateLM):
    """A run as a model of lm-evaluation-harness.

    Texts are formatted as in training. A text that is longer than the training length loses its beginning.
    """

    def __init__(self, run_model: RunModel):
        super().__init__()
        check_scorable(run_model.spec, run_model.name)
        self.run_model = run_model
        self.prefix_ids = run_model.encode('')
        self.max_length = run_model.spec.data.length
        self.max_text_tokens = self.max_length - len(self.prefix_ids)

    @property
    def eot_token_id(self) -> int:
        return self.run_model.spec.data.end_token

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without a context: BOS, or the end-of-text token."""
        return [self.eot_token_id, *self.prefix_ids][-1]

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return self.run_model.encode_text(string) if add_special_tokens is False else self.run_model.encode(string)

    def _loglikelihood_tokens(self, requests: list, disable_tqdm: bool = False, **_: Any) -> list[tuple[float, bool]]:
        """Return (log-probability of the continuation, whether greedy decoding gives it) for each request.

        Lengths are padded to powers of two, so that there are few shapes to compile. Padding follows the text, so
        that its causal attention does not see it.
        """
        parts_by_length: dict[int, list[tuple[int, list[int], int]]] = {}
        for index, (_, context, continuation) in enumerate(requests):
            for ids, num_predicted in self.split_request(context, continuation):
                parts = parts_by_length.setdefault(self.choose_length(len(ids) - 1), [])
                parts.append((index, ids, num_predicted))
        scores = np.zeros(len(requests))
        is_greedy = np.ones(len(requests), bool)
        for length, parts in parts_by_length.items():
            ids_PT = np.array([[*ids, *[0] * (length + 1 - len(ids))] for _, ids, _ in parts], np.int32)
            arrays = self.run_model.score_tokens(ids_PT)
            for row, (index, ids, num_predicted) in enumerate(parts):
                predicted = 0, row, slice(len(ids) - 1 - num_predicted, len(ids) - 1)
                scores[index] -= arrays['loss_LPT'][predicted].sum(dtype=float)
                is_greedy[index] &= arrays['is_greedy_LPT'][predicted].all()
        return list(zip(scores.tolist(), is_greedy.tolist(), strict=True))

    def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = False) -> list[float]:
        texts = [self.run_model.encode_text(request.args[0]) for request in requests]
        scores = self._loglikelihood_tokens([(None, [self.prefix_token_id], ids) for ids in texts], disable_tqdm)
        return [score for score, _ in scores]

    def generate_until(self, requests: list, disable_tqdm: bool = False) -> list[str]:
        raise UserError('a task generates text, and runs only score given texts; give a task with choices or a loss')

    def split_request(self, context: list[int], continuation: list[int]) -> Iterator[tuple[list[int], int]]:
        """Yield (ids, number of last ids to predict): one part, or several for a long continuation."""
        context = context or [self.prefix_token_id]  # lm_eval has moved a context of spaces into the continuation
        ids = [*context, *continuation]
        for start in range(len(context), len(ids), self.max_text_tokens):
            end = min(start + self.max_text_tokens, len(ids))
            text_ids = ids[len(self.prefix_ids) : end - 1][-self.max_text_tokens :]
            yield [*self.prefix_ids, *text_ids, ids[end - 1]], end - start

    def choose_length(self, length: int) -> int:
        """Return the padded length of a text."""
        return min(max(MIN_LENGTH, 1 << (length - 1).bit_length()), self.max_length)


def check_scorable(spec: Spec, name: str) -> None:
    """Refuse a run that cannot score texts, or that was trained on another format of texts."""
    data = spec.data
    if data.task != 'text':
        raise UserError(f'{name} was trained on {data.task}, not on text; give another run')
    has_fixed_token = (data.fixed_position or 1) > 1 and data.fixed_held_out
    if spec.model.mask.prefix or has_fixed_token or data.random_first:
        raise UserError(
            f'{name} was trained with mask.prefix, or with fixed or random tokens inside texts (data.fixed_position, '
            'data.random_first), and does not score plain texts; give another run'
        )


def load_task_manager(task_names: list[str], include_dir: str | None) -> TaskManager:
    """Return a task manager of `include_dir` alone if it has all tasks, otherwise of all tasks of lm_eval.

    Indexing the tasks of lm_eval is slow.
    """
    manager = TaskManager(include_path=include_dir, include_defaults=False)
    return manager if {*task_names} <= {*manager.all_subtasks} else TaskManager(include_path=include_dir)


def match_tasks(manager: TaskManager, task_names: list[str]) -> list[str]:
    """Return the tasks that match names or patterns; raise UserError for a name that matches none."""
    for name in task_names:
        if not manager.match_tasks([name]):
            message = format_unknown_name(
                f'--tasks={name}', name, manager.all_tasks, 'tasks of lm-evaluation-harness'
            )
            raise UserError(f'{message}; give --include=DIR for your own')
    return manager.match_tasks(task_names)


def evaluate_tasks(
    run_ref: str,
    task_names: list[str],
    include_dir: str | None = None,
    limit: int | None = None,
    few_shot: int | None = None,
) -> dict[str, Any]:
    """Evaluate RUN[@STEP] on tasks; return the metrics of each task and group under the names of lm_eval."""
    os.environ['DISABLE_MULTIPROC'] = '1'  # lm_eval would fork this process, which has threads
    manager = load_task_manager(task_names, include_dir)
    matched_names = match_tasks(manager, task_names)
    lm = SinklabLM(RunModel(*resolve_checkpoint(run_ref)))
    try:
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
    except UserError:
        raise
    except (OSError, ValueError) as error:  # of the hub, of data files, or of a task that needs more than text
        raise UserError(
            f'{", ".join(matched_names)} cannot be evaluated ({format_error(error, with_type=True)}); tasks read '
            'their data from the Hugging Face hub, or from the files that their YAML file names'
        ) from error
    summaries = {name: summarize_task(name, results) for name in {**results['results'], **results.get('groups', {})}}
    return dict(model=lm.run_model.name, lm_eval=version('lm_eval'), limit=limit, tasks=summaries)


def summarize_task(name: str, results: dict) -> dict[str, Any]:
    numbers = {**results['results'], **results.get('groups', {})}[name]
    return dict(
        version=results['versions'].get(name),
        few_shot=results['n-shot'].get(name),
        samples=results['n-samples'].get(name, {}).get('effective'),
        numbers={
            key: value
            for key, value in numbers.items()
            if isinstance(value, int | float) and key not in NON_METRIC_KEYS
        },
    )
