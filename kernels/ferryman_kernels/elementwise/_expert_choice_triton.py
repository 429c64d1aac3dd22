"""The choice of experts on a card, one program a token: its experts lie in lanes, by groups.

A round takes the greatest rank and, of equal ones, the lowest lane. Ranks are compared as integers
of the same order, in which a lane that was taken is below every number, -inf too, and NaN is above.
So the chosen experts are distinct whatever the scores are, and no index is out of range.
"""

from __future__ import annotations

from ferryman_kernels._triton import Kernel, KernelPart, tl


@KernelPart
def _in_order(x: tl.tensor) -> tl.tensor:
    """Integers that are ordered as the numbers x are: zeros of both signs are equal, NaN is the
    greatest, and the least integer of the type stands for none."""
    positive = tl.where(x == 0, 0.0, x)
    if x.dtype == tl.float64:
        bits = positive.to(tl.int64, bitcast=True)
        keys = bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF)
        keys = tl.where(x != x, tl.full(x.shape, 0x7FFFFFFFFFFFFFFF, tl.int64), keys)
    else:
        bits = positive.to(tl.int32, bitcast=True)
        keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        keys = tl.where(x != x, tl.full(x.shape, 0x7FFFFFFF, tl.int32), keys)
    return keys


@KernelPart
def _taken(keys: tl.tensor) -> tl.tensor:
    """Keys of lanes that are not to be chosen."""
    if keys.dtype == tl.int64:
        none = tl.full(keys.shape, -0x8000000000000000, tl.int64)
    else:
        none = tl.full(keys.shape, -0x80000000, tl.int32)
    return none


@KernelPart
def _first_best(keys: tl.tensor, lane: tl.tensor, LANES: tl.constexpr) -> tl.tensor:
    """The lowest lane with the greatest key."""
    return tl.min(tl.where(keys == tl.max(keys, axis=0), lane, LANES), axis=0)


@KernelPart
def _measured(x: tl.tensor, is_expert: tl.tensor, MEASURE: tl.constexpr) -> tl.tensor:
    """softmax(x) over the experts, sigmoid(x) or √softplus(x), rounded once."""
    wide = x.to(tl.float64)
    if MEASURE == "SOFTMAX":
        wide = tl.where(is_expert, wide, float("-inf"))
        powers = tl.exp(wide - tl.max(wide, axis=0))
        measures = powers / tl.sum(powers, axis=0)
    elif MEASURE == "SQRT_SOFTPLUS":
        power = tl.exp(-tl.abs(wide))
        # log(1 + power) of what is left of the power in that sum, in proportion.
        left = (1.0 + power) - 1.0
        log = tl.log(1.0 + power) * power / tl.where(left == 0, 1.0, left)
        log = tl.where(left == 0, power, log)
        opened = tl.where(wide > 20.0, wide, tl.where(wide > 0, wide, 0.0) + log)
        measures = tl.sqrt(opened)
    else:
        measures = 1.0 / (1.0 + tl.exp(-wide))
    return measures.to(x.dtype)


@KernelPart
def _in_best_groups(
    keys: tl.tensor,
    ranks: tl.tensor,
    GROUPS: tl.constexpr,
    GROUP_LANES: tl.constexpr,
    LANES: tl.constexpr,
    GROUPS_CHOSEN: tl.constexpr,
    BEST_EXPERTS: tl.constexpr,
) -> tl.tensor:
    """The keys [GROUP_LANES · LANES], those outside the best groups taken."""
    left = tl.reshape(keys, [GROUP_LANES, LANES])
    grouped = tl.reshape(ranks, [GROUP_LANES, LANES])
    lane = tl.arange(0, LANES)
    merits = tl.zeros([GROUP_LANES], ranks.dtype)
    for _ in tl.static_range(BEST_EXPERTS):
        best = tl.max(left, axis=1)
        first = tl.min(tl.where(left == best[:, None], lane[None, :], LANES), axis=1)
        is_first = lane[None, :] == first[:, None]
        merits += tl.sum(tl.where(is_first, grouped, 0.0), axis=1)
        left = tl.where(is_first, _taken(left), left)
    group = tl.arange(0, GROUP_LANES)
    order = _in_order(merits)
    order = tl.where(group < GROUPS, order, _taken(order))
    is_outside = tl.full([GROUP_LANES], 1, tl.int32)
    for _ in tl.static_range(GROUPS_CHOSEN):
        first = _first_best(order, group, GROUP_LANES)
        is_outside = tl.where(group == first, 0, is_outside)
        order = tl.where(group == first, _taken(order), order)
    outside = tl.broadcast_to(is_outside[:, None], [GROUP_LANES, LANES])
    return tl.where(tl.reshape(outside, [GROUP_LANES * LANES]) != 0, _taken(keys), keys)


@KernelPart
def _share_of_chosen(best: tl.tensor, is_place: tl.tensor, MEASURE: tl.constexpr) -> tl.tensor:
    """Shares of the chosen experts' scores, where no measure of all experts made their ranks."""
    if MEASURE == "SOFTMAX_OF_CHOSEN":
        shares = _measured(best, is_place, "SOFTMAX")
    else:
        shares = _measured(best, is_place, MEASURE)
    return shares


@KernelPart
def _divided(
    shares: tl.tensor, is_place: tl.tensor, ADDED: tl.constexpr, LEAST: tl.constexpr
) -> tl.tensor:
    """Shares by their sum, rounded once."""
    total = tl.sum(tl.where(is_place, shares, 0.0), axis=0) + ADDED
    total = tl.where(total < LEAST, LEAST, total)
    return (shares.to(tl.float64) / total.to(tl.float64)).to(shares.dtype)


@Kernel
def choose_kernel(
    scores_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    shares_ptr: tl.tensor,
    chosen_ptr: tl.tensor,
    stride: int,
    PER_TOKEN: tl.constexpr,
    PLACES: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_LANES: tl.constexpr,
    IN_GROUP: tl.constexpr,
    LANES: tl.constexpr,
    GROUPS_CHOSEN: tl.constexpr,
    BEST_EXPERTS: tl.constexpr,
    MEASURE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    DIVIDES: tl.constexpr,
    ADDED: tl.constexpr,
    LEAST: tl.constexpr,
    SCALING: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """One token: ranks, groups, a round for each expert, and the shares of the chosen."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, GROUP_LANES * LANES)
    is_expert = (lane // LANES < GROUPS) & (lane % LANES < IN_GROUP)
    expert = lane // LANES * IN_GROUP + lane % LANES
    scores = tl.load(scores_ptr + row * stride + expert, mask=is_expert, other=0.0).to(WIDE)
    measures, ranks = scores, scores
    OF_CHOSEN: tl.constexpr = MEASURE == "SIGMOID_OF_CHOSEN" or (
        MEASURE != "SOFTMAX" and not HAS_BIAS
    )
    if not OF_CHOSEN:
        measures = _measured(scores, is_expert, MEASURE)
    if HAS_BIAS:
        ranks = measures + tl.load(bias_ptr + expert, mask=is_expert, other=0.0).to(WIDE)
    keys = _in_order(ranks)
    keys = tl.where(is_expert, keys, _taken(keys))
    if GROUPS > 1:
        # Without a bias a group is ranked by its best expert alone, in the order of the scores.
        keys = _in_best_groups(keys, ranks, GROUPS, GROUP_LANES, LANES, GROUPS_CHOSEN, BEST_EXPERTS)
    place = tl.arange(0, PLACES)
    chosen = tl.zeros([PLACES], tl.int32)
    shares = tl.zeros([PLACES], WIDE)
    for taken in range(PER_TOKEN):
        first = _first_best(keys, lane, GROUP_LANES * LANES)
        keys = tl.where(lane == first, _taken(keys), keys)
        share = tl.sum(tl.where(lane == first, measures, 0.0), axis=0)
        chosen = tl.where(place == taken, first // LANES * IN_GROUP + first % LANES, chosen)
        shares = tl.where(place == taken, share, shares)
    is_place = place < PER_TOKEN
    if OF_CHOSEN:
        shares = _share_of_chosen(shares, is_place, MEASURE)
    if DIVIDES:
        shares = _divided(shares, is_place, ADDED, LEAST)
    shares *= SCALING
    if HAS_SCALES:
        shares *= tl.load(scales_ptr + chosen, mask=is_place, other=0.0).to(WIDE)
    at = row * PER_TOKEN + place
    tl.store(shares_ptr + at, shares.to(shares_ptr.dtype.element_ty), mask=is_place)
    tl.store(chosen_ptr + at, chosen.to(tl.int64), mask=is_place)


@Kernel
def choose_one_by_one_kernel(
    scores_ptr: tl.tensor,
    shares_ptr: tl.tensor,
    chosen_ptr: tl.tensor,
    stride: int,
    EXPERTS: tl.constexpr,
    LANES: tl.constexpr,
    NEAR: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """One token: the best expert, then the best of the others."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    is_left = lane < EXPERTS
    scores = tl.load(scores_ptr + row * stride + lane, mask=is_left, other=0.0).to(WIDE)
    keys = _in_order(scores)
    keys = tl.where(is_left, keys, _taken(keys))
    for taken in tl.static_range(2):
        first = _first_best(keys, lane, LANES)
        best = tl.sum(tl.where(lane == first, scores, 0.0), axis=0)
        size = tl.abs(scores)
        size = tl.where(size < best, best, size)
        gap = (best - scores).to(tl.float64) / size.to(tl.float64)
        # NaN, as of two zeros, is near.
        near = tl.where(is_left & (gap.to(WIDE) > NEAR), float("-inf"), scores)
        near = tl.where(is_left, near, float("-inf"))
        powers = tl.exp(near.to(tl.float64) - best)
        share = 1.0 / tl.sum(powers, axis=0)
        tl.store(shares_ptr + 2 * row + taken, share.to(shares_ptr.dtype.element_ty))
        tl.store(chosen_ptr + 2 * row + taken, first.to(tl.int64))
        is_left = is_left & (lane != first)
        keys = tl.where(lane == first, _taken(keys), keys)


@Kernel
def look_up_kernel(
    scores_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    table_ptr: tl.tensor,
    shares_ptr: tl.tensor,
    chosen_ptr: tl.tensor,
    stride: int,
    PER_TOKEN: tl.constexpr,
    PLACES: tl.constexpr,
    MEASURE: tl.constexpr,
    DIVIDES: tl.constexpr,
    ADDED: tl.constexpr,
    LEAST: tl.constexpr,
    SCALING: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """One token: the experts of its id, and their shares."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PLACES)
    is_place = place < PER_TOKEN
    token_id = tl.load(ids_ptr + row).to(tl.int64)
    chosen = tl.load(table_ptr + token_id * PER_TOKEN + place, mask=is_place, other=0)
    scores = tl.load(scores_ptr + row * stride + chosen, mask=is_place, other=0.0).to(WIDE)
    shares = _measured(scores, is_place, MEASURE)
    if DIVIDES:
        shares = _divided(shares, is_place, ADDED, LEAST)
    at = row * PER_TOKEN + place
    tl.store(shares_ptr + at, (shares * SCALING).to(shares_ptr.dtype.element_ty), mask=is_place)
    tl.store(chosen_ptr + at, chosen, mask=is_place)
