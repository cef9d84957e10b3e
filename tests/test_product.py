"""Products with parameters, and their gradients, whichever of their factors is the larger one."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sinklab
from sinklab.model.parameter import multiply

MODEL = Path(sinklab.__file__).parent / 'model'
EQUATIONS = sorted(
    {
        equation
        for path in MODEL.glob('*.py')
        for equation in re.findall(r"(?:product|multiply)\(\s*'([A-Z,]+->[A-Z]+)'", path.read_text(encoding='utf-8'))
    }
)
SIZES = dict(B=2, T=3, H=2, K=4, S=5)


@pytest.mark.parametrize('wide', ['', 'D', 'F', 'V', 'G'])
@pytest.mark.parametrize('equation', EQUATIONS)
def test_gradients_are_those_of_the_plain_einsum(equation, wide):
    sizes = {letter: SIZES.get(letter, 24 if letter == wide else 6) for letter in equation if letter.isalpha()}
    of_x, of_weight = equation.partition('->')[0].split(',')
    rng = np.random.default_rng(0)
    x, weight = (rng.normal(size=[sizes[one] for one in letters]).astype('float32') for letters in (of_x, of_weight))
    axes = (None,) * weight.ndim
    y, back = jax.vjp(lambda *given: multiply(equation, axes, None, *given), x, weight)
    expected, plain = jax.vjp(lambda *given: jnp.einsum(equation, *given), x, weight)
    np.testing.assert_array_equal(y, expected)
    d_y = rng.normal(size=y.shape).astype('float32')
    for ours, theirs in zip(back(d_y), plain(d_y), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_the_equations_of_the_model_are_found():
    assert {'BTD,DHK->BTHK', 'BTF,FD->BTD', 'BTHD,DHK->BTHK', 'BTHK,KJ->BTHJ'} <= {*EQUATIONS}
