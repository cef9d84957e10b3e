import dataclasses

import jax
from flax import nnx

from sinklab import spec
from sinklab.model.attention import SelfAttention, View
from sinklab.model.capture import Capture
from sinklab.model.ffn import FFN
from sinklab.model.norm import Norms
from sinklab.model.remat import kept
from sinklab.sharding import place


class Block(nnx.Module):
    """Attention, then the FFN, each a branch of the residual stream."""

    def __init__(self, model: spec.Model, rngs: nnx.Rngs):
        self.attention_norms = Norms(model)
        self.attention = SelfAttention(model, rngs)
        self.ffn_norms = Norms(model)
        self.ffn = FFN(model, rngs)

    def __call__(self, x_BTD: jax.Array, view: View) -> tuple[jax.Array, Capture]:
        norms = self.attention_norms
        normed_BTD = norms.before(x_BTD)
        attended_BTD, captured = self.attention(normed_BTD, view)
        x_BTD = kept(norms.joined(place(x_BTD + norms.after(attended_BTD), 'batch', None, None)), 'middle')
        norms = self.ffn_norms
        sum_BTD = place(x_BTD + norms.after(self.ffn(norms.before(x_BTD))), 'batch', None, None)
        if view.capture:
            captured = dataclasses.replace(captured, normed_BTD=normed_BTD, residual_BTD=sum_BTD)
        return norms.joined(sum_BTD), captured
