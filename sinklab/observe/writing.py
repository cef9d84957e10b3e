"""Texts that a model goes on with, as a task of lm-evaluation-harness asks for them."""

import dataclasses
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from sinklab.record import Refusal

LIMITS = 'max_gen_toks', 'max_new_tokens', 'max_tokens', 'max_completion_tokens'  # one, by several names
USUAL = 256  # tokens, where a task names none
KNOWN = 'until', 'do_sample', 'temperature', *LIMITS
CUTS = 'top_k', 'top_p', 'min_p'  # of what is drawn from: without effect on the likeliest
PLAIN = ('num_beams', 1), ('top_p', 1), ('top_k', 0), ('repetition_penalty', 1)


@dataclasses.dataclass(frozen=True)
class Asked:
    until: tuple[str, ...]
    most: int  # tokens
    temperature: float  # 0: the likeliest token


def asked(given: dict[str, Any]) -> Asked:
    """What a task wants of a text; what would change it and is not known here is refused."""
    until = given.get('until') or ()
    sampled = given.get('do_sample')
    temperature = float(given.get('temperature', 1.0 if sampled else 0.0)) if sampled is not False else 0.0
    for name, value in given.items():
        if not (name in KNOWN or (name, value) in PLAIN or (name in CUTS and not temperature)):
            raise Refusal(f'a task asks for {name}={value}, which sinklab cannot do; it knows {", ".join(KNOWN)}')
    most = next((int(given[name]) for name in LIMITS if given.get(name) is not None), USUAL)
    return Asked((until,) if isinstance(until, str) else tuple(until), most, temperature)


class Text:
    """One that is being written, from its context on."""

    def __init__(self, context: list[int], asked: Asked):
        self.ids, self.begin, self.asked = list(context), len(context), asked
        self.said, self.done = '', asked.most < 1

    def add(self, logits_V: np.ndarray, rng: np.random.Generator, end: int, tokenizer: Tokenizer) -> None:
        chosen = drawn(logits_V, self.asked.temperature, rng)
        if chosen == end:
            self.done = True
            return
        self.ids.append(chosen)
        said = tokenizer.decode(self.ids[self.begin :], skip_special_tokens=False)
        found = [said.find(stop) for stop in self.asked.until if stop and stop in said]
        self.said = said[: min(found, default=len(said))]
        self.done = bool(found) or len(self.ids) - self.begin >= self.asked.most


def drawn(logits_V: np.ndarray, temperature: float, rng: np.random.Generator) -> int:
    """argmax, or v with probability softmax(logits / temperature)_v."""
    if not temperature:
        return int(logits_V.argmax())
    score_V = np.float64(logits_V) / temperature
    weight_V = np.exp(score_V - score_V.max())
    return int(rng.choice(len(weight_V), p=weight_V / weight_V.sum()))
