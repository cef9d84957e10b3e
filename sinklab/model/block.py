import jax
from flax import nnx

from sinklab import spec
from sinklab.attend.mask import Mask
from sinklab.model.attention import SelfAttention
from sinklab.model.capture import Capture
from sinklab.model.ffn import SwiGLU
from sinklab.model.norm import RMSNorm
from sinklab.sharding import place


class Block(nnx.Module):
    """x + attention(norm(x)), then x + ffn(norm(x))."""

    def __init__(self, model: spec.Model, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(model.width, model.norm_epsilon)
        self.attention = SelfAttention(model, rngs)
        self.ffn_norm = RMSNorm(model.width, model.norm_epsilon)
        self.ffn = SwiGLU(model, rngs)

    def __call__(self, x_BTD: jax.Array, mask: Mask, capture: bool) -> tuple[jax.Array, Capture]:
        attended_BTD, attention_BHTS = self.attention(self.attention_norm(x_BTD), mask)
        x_BTD = place(x_BTD + attended_BTD, 'batch', None, None)
        x_BTD = place(x_BTD + self.ffn(self.ffn_norm(x_BTD)), 'batch', None, None)
        return x_BTD, Capture(attention_BHTS, x_BTD) if capture else Capture()
