"""Which blocks of scores a kernel visits, and which of them it masks."""

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sinklab.attend import blocks
from sinklab.attend import mask as masks

intervals = st.lists(st.tuples(st.integers(0, 64), st.integers(0, 64)), min_size=64, max_size=64)


@settings(max_examples=50, deadline=None)
@given(intervals, st.sampled_from([(8, 8), (16, 8), (8, 32), (64, 64)]), st.booleans())
def test_a_plan_visits_what_is_seen_and_masks_what_is_seen_in_part(pairs, block, transposed):
    start, end = np.array(pairs, np.int32).T
    mask = masks.static(start, end)
    visible_IJ = np.asarray(mask.visible(64))[0].reshape(64 // block[0], block[0], 64 // block[1], block[1])
    for given_mask in (mask, masks.Mask(jnp.asarray(start)[None], jnp.asarray(end)[None], mask.hull_2T)):
        plan = (blocks.by_key if transposed else blocks.by_query)(given_mask, 64, block)
        outer_N, inner_N = plan.outer_N, plan.inner_N
        assert (np.diff(outer_N) >= 0).all()
        assert set(outer_N) == set(range(64 // block[transposed]))
        query_N, key_N = (inner_N, outer_N) if transposed else (outer_N, inner_N)
        kind_IJ = np.full((64 // block[0], 64 // block[1]), blocks.HIDDEN)
        kind_IJ[query_N, key_N] = np.asarray(plan.kind_BN)[0]
        assert (visible_IJ.all((1, 3)) == (kind_IJ == blocks.INTERIOR)).all()
        assert not (visible_IJ.any((1, 3)) & (kind_IJ == blocks.HIDDEN)).any()
