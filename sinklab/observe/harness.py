"""A step of a run as a model of lm-evaluation-harness: --model sinklab --model_args run=RUN@STEP."""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from tqdm import tqdm

from sinklab import sharding
from sinklab.model.transformer import logits
from sinklab.observe.opening import subject
from sinklab.observe.own import Own
from sinklab.observe.writing import Text, asked
from sinklab.record import Refusal
from sinklab.spec import Spec
from sinklab.train import state
from sinklab.train.evaluation import tokenwise
from sinklab.train.forward import forward

AT_ONCE = 1 << 29  # bytes of logits in float32
SHORTEST = 32  # shorter texts are read as texts of so many tokens


@register_model('sinklab')
class Harness(TemplateLM):
    """Texts as training shaped them; of one that is too long, what the training length has room for at its end."""

    def __init__(self, run: str | Own, batch_size: int | str = 'auto', **_: Any):  # a device is for jax to choose
        super().__init__()
        self.own = run if isinstance(run, Own) else subject(str(run))
        if not isinstance(self.own, Own):
            raise Refusal(f'run={run} is an open model; give lm-evaluation-harness --model hf for it')
        check(self.own.spec, self.own.name)
        self.before, self.max_length = self.own.encode(''), self.own.spec.data.length
        self.room = self.max_length - len(self.before)
        self.most = None if batch_size in ('auto', None) else int(batch_size)
        self.rng = np.random.default_rng(0)

    @property
    def eot_token_id(self) -> int:
        return self.own.spec.data.end_token

    @property
    def prefix_token_id(self) -> int:
        """What a text without a context comes after: BOS, or the end of another text."""
        return [self.eot_token_id, *self.before][-1]

    def get_model_info(self) -> dict[str, str]:
        return dict(model=self.own.name, model_sha=self.own.digest)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        ids = self.own.encode(string)
        return ids[len(self.before) :] if add_special_tokens is False else ids

    def _loglikelihood_tokens(self, requests: list, disable_tqdm: bool = False, **_: Any) -> list[tuple[float, bool]]:
        parts = [[*self.parts(context, continuation)] for _, context, continuation in requests]
        scores = iter(self.scores([part for found in parts for part in found], disable_tqdm))
        of_requests = [[next(scores) for _ in found] for found in parts]
        return [
            (sum((score for score, _ in found), 0.0), all(greedy for _, greedy in found)) for found in of_requests
        ]

    def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = False) -> list[float]:
        texts = [self.tok_encode(request.args[0], add_special_tokens=False) for request in requests]
        found = self._loglikelihood_tokens([(None, [self.prefix_token_id], ids) for ids in texts], disable_tqdm)
        return [score for score, _ in found]

    def generate_until(self, requests: list, disable_tqdm: bool = False) -> list[str]:
        """Every token by a pass over all before it; texts that are finished make room for others."""
        given = [request.args for request in requests]
        texts = [Text(self.tok_encode(context) or [self.prefix_token_id], asked(how)) for context, how in given]
        rows = self.rows(self.max_length, len(texts))
        with tqdm(total=len(texts), disable=disable_tqdm, desc='texts written') as told:
            while left := [text for text in texts if not text.done]:
                self.write(left[:rows], rows)
                told.update(sum(text.done for text in left))
        return [text.said for text in texts]

    def cut(self, ids: list[int]) -> list[int]:
        """What is read of ids that begin as every text does."""
        return [*self.before, *ids[len(self.before) :][-self.room :]]

    def parts(self, context: list[int], continuation: list[int]) -> Iterator[tuple[list[int], int]]:
        """(ids, how many of the last are predicted): one, or more of a continuation that is too long for one."""
        context = context or [self.prefix_token_id]  # it was of spaces alone, which the library moves
        ids = [*context, *continuation]
        for start in range(len(context), len(ids), self.room):
            end = min(start + self.room, len(ids))
            yield [*self.cut(ids[: end - 1]), ids[end - 1]], end - start

    def scores(self, parts: list[tuple[list[int], int]], quiet: bool) -> list[tuple[float, bool]]:
        """(log-probability of what is predicted, whether each of it is the likeliest), of each part."""
        found: list[Any] = [None] * len(parts)
        with tqdm(total=len(parts), disable=quiet, desc='texts read') as told, jax.set_mesh(self.own.mesh):
            for numbers, rows, length in self.batches([len(ids) - 1 for ids, _ in parts]):
                ids_BT = filled([parts[number][0] for number in numbers], rows, length + 1)
                loss_BT, right_BT = self.run(self.by_token, ids_BT)
                for row, number in enumerate(numbers):
                    ids, count = parts[number]
                    places = row, slice(len(ids) - 1 - count, len(ids) - 1)
                    found[number] = -loss_BT[places].sum(dtype=float), bool(right_BT[places].all())
                told.update(len(numbers))
        return found

    def write(self, texts: list[Text], rows: int) -> None:
        """Adds a token to each."""
        seen = [self.cut(text.ids) for text in texts]
        ids_BT = filled(seen, rows, self.length(max(map(len, seen))))
        last_B = np.array([len(ids) - 1 for ids in seen] + [0] * (rows - len(seen)))
        with jax.set_mesh(self.own.mesh):
            logits_BV = self.run(self.following, ids_BT, last_B)
        for text, logits_V in zip(texts, logits_BV, strict=False):
            text.add(logits_V, self.rng, self.eot_token_id, self.own.tokenizer)

    def batches(self, lengths: list[int]) -> Iterator[tuple[list[int], int, int]]:
        """(which texts, rows, length) of each batch, the longest first, in few shapes."""
        by_length: dict[int, list[int]] = {}
        for number, length in enumerate(lengths):
            by_length.setdefault(self.length(length), []).append(number)
        for length, numbers in sorted(by_length.items(), reverse=True):
            rows = self.rows(length, len(numbers))
            yield from ((numbers[at : at + rows], rows, length) for at in range(0, len(numbers), rows))

    def length(self, length: int) -> int:
        """What is read for a text of so many tokens: what follows it is without effect."""
        return min(max(SHORTEST, power_of_two(length)), self.max_length)

    def rows(self, length: int, count: int) -> int:
        most = self.most or max(1, AT_ONCE // (4 * self.own.vocabulary * length))
        return min(most, power_of_two(count))

    def run(self, program: Callable, ids_BT: np.ndarray, *more: np.ndarray) -> Any:
        return jax.device_get(program(self.own.params, sharding.put(ids_BT, self.own.mesh), *more))

    @functools.cached_property
    def by_token(self) -> Callable:
        return tokenwise(self.own.spec, self.own.mesh)

    @functools.cached_property
    def following(self) -> Callable:
        """following(params, ids_BT, last_B) -> logits_BV of what comes after the last token of each text."""
        run = forward(self.own.spec)

        def following(params: dict, ids_BT: jax.Array, last_B: jax.Array) -> jax.Array:
            hidden_BTD, head_VD, _ = run(params, ids_BT)
            return logits(jnp.take_along_axis(hidden_BTD, last_B[:, None, None], 1), head_VD)[:, 0]

        return jax.jit(following, **state.jit_options(self.own.spec, self.own.mesh))


def check(spec: Spec, name: str) -> None:
    """Refuses what has no likelihood of a text, or none that its training was of."""
    data, prefix = spec.data, spec.model.mask.prefix
    if data.task != 'text':
        raise Refusal(f'{name} was trained on {data.task}, not on text; give another run')
    if prefix:
        raise Refusal(
            f'{name} shows the first {prefix} tokens to all of a text (mask.prefix), and predicts none of them'
        )
    if (data.fixed_position or 1) > 1 and data.fixed_held_out:
        raise Refusal(f'{name} was trained with a fixed token inside of each text (data.fixed_position)')
    if data.random_first:
        raise Refusal(f'{name} was trained with random tokens inside of each text (data.random_first)')


def filled(texts: Iterable[list[int]], rows: int, length: int) -> np.ndarray:
    """ids_BT of texts, whose end no query of theirs sees."""
    ids_BT = np.zeros((rows, length), np.int32)
    for ids_T, ids in zip(ids_BT, texts, strict=False):
        ids_T[: len(ids)] = ids
    return ids_BT


def power_of_two(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


if __name__ == '__main__':  # lm_eval's own command line, which looks for models in itself alone
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
