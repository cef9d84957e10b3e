"""How a backend is chosen, verified and refused."""

import dataclasses

import pytest
from conftest import attention
from fusing import KERNELS, interpreted

from sinklab.attend import cudnn, epilogue, fused
from sinklab.attend import mask as masks
from sinklab.record import Refusal

pytestmark = pytest.mark.usefixtures('small_blocks')


@pytest.mark.parametrize(
    ('wanted', 'platform', 'case', 'message'),
    [
        ('tpu', 'cpu', {}, 'it is for tpu, and the devices here are cpu'),
        ('cudnn', 'gpu', dict(attention=attention('sigmoid', 'none')), 'it knows softmax alone'),
        ('tpu', 'tpu', dict(attention=attention('softpick', 'sum')), 'softpick'),
        ('tpu', 'tpu', dict(elementwise=False), 'a learned table'),
        ('tpu', 'tpu', dict(attention=attention('sigmoid', 'p_norm', power=5.0)), 'may underflow'),
        ('tpu', 'tpu', dict(width=512, value_width=512), 'heads wider than 256'),
        ('tpu', 'tpu', dict(length=2**20), 'does not stay on the chip'),
    ],
)
def test_a_backend_that_cannot_is_refused_with_what_can(wanted, platform, case, message):
    plain = fused.Case(attention('exp', 'sum'), 256, 2, 64, 64, 'bfloat16')
    with pytest.raises(Refusal, match=message) as refused:
        fused.choose(wanted, platform, dataclasses.replace(plain, **case))
    assert 'auto, dense, chunked' in str(refused.value)


def test_a_causal_window_is_given_to_cudnn_as_one():
    assert cudnn.window(masks.causal(8)) is None
    assert cudnn.window(masks.causal(8) & masks.window(8, 3)) == (2, 0)
    with pytest.raises(AssertionError):
        cudnn.window(masks.prefix(8, 3))


@pytest.mark.slow
def test_a_kernel_that_computes_something_else_is_passed_over_and_said(monkeypatch):
    case = fused.Case(attention('exp', 'p_norm'), 384, 2, 64, 64, 'bfloat16', columns=1, curve=True, mask='window')
    with interpreted():
        assert fused.choose('auto', 'tpu', case) == fused.Choice('tpu')
        monkeypatch.setattr(epilogue, 'attend', doubled(epilogue.attend))
        choice = fused.choose('auto', 'tpu', case)
    assert choice.backend == 'chunked'
    assert 'wrong on these devices' in str(choice)


@pytest.mark.parametrize('platform', ['tpu', 'gpu'])
@pytest.mark.parametrize('operation', KERNELS, ids='-'.join)
def test_kernels_say_that_they_cover_every_operation_but_softpick(operation, platform):
    case = fused.Case(attention(*operation), 4096, 8, 128, 128, 'bfloat16', columns=1, curve=True)
    assert fused.cannot(platform, platform, case) is None


def doubled(attend):
    def twice(*given):
        output, rows = attend(*given)
        return 2 * output, rows

    return twice
