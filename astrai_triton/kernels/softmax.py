"""Online softmax in base 2: scores arrive multiplied by log2(e), so that every exponential is one exp2.

A row's state is (max, sum): the largest score so far and the sum of exp2(score - max). A row that has seen
nothing has max = -inf and sum = 0, and every function here keeps it so.
"""

import triton
import triton.language as tl


@triton.jit
def anchor(
    score_max,  # f32, any shape
):
    """What to subtract before exp2: the maximum, or 0 where it is -inf, since inf - inf is NaN."""
    return tl.where(score_max == float("-inf"), 0.0, score_max)


@triton.jit
def update_softmax(
    scores,  # [m, n] f32 base 2, -inf where masked
    score_max,  # [m] f32
    score_sum,  # [m] f32
):
    """Take in a tile of scores.

    Returns the weights [m, n], the factor [m] for what was accumulated before, and the new (max, sum).
    """
    new_max = tl.maximum(score_max, tl.max(scores, 1))
    shift = anchor(new_max)
    weights = tl.exp2(scores - shift[:, None])
    rescale = tl.exp2(score_max - shift)
    return weights, rescale, new_max, score_sum * rescale + tl.sum(weights, 1)


@triton.jit
def cap_scores(
    scores,  # f32, scaled by softmax_scale / softcap
    cap,  # softcap * log2(e)
):
    """cap * tanh(scores), the softcap in base 2."""
    # Near 0 the difference of two numbers close to 1 would lose digits; there the series is exact to 2e-11.
    square = scores * scores
    series = scores * (1 + square * (-1 / 3 + square * (2 / 15 - square * (17 / 315))))
    # 2 * log2(e): tanh(x) = 1 - 2 / (1 + exp(2x)); exp2 may reach inf, then the result is 1.
    far = 1 - 2 / (1 + tl.exp2(scores * 2.8853900817779268))
    return cap * tl.where(square < 0.01, series, far)


@triton.jit
def add_sink(
    score_max,  # [m] f32
    score_sum,  # [m] f32
    sink,  # [m] f32 base 2
):
    """Let one more score without a value join the sum; to be done once a row.

    Returns the factor [m] for what was accumulated, and the new (max, sum).
    """
    new_max = tl.maximum(score_max, sink)
    shift = anchor(new_max)
    rescale = tl.exp2(score_max - shift)
    # An explicit fma: two kernels that end a row must round alike, whatever the compiler would contract.
    return rescale, new_max, tl.fma(score_sum, rescale, tl.exp2(sink - shift))


@triton.jit
def invert_sum(
    score_sum,  # [m] f32
):
    """1 / sum, and 0 for a row that has seen nothing."""
    return tl.where(score_sum > 0, 1 / tl.where(score_sum > 0, score_sum, 1.0), 0.0)


@triton.jit
def log_sum(
    score_max,  # [m] f32 base 2
    score_sum,  # [m] f32
):
    """Natural log-sum-exp of a row; -inf for a row that has seen nothing."""
    is_empty = score_sum == 0
    value = (score_max + tl.log2(tl.where(is_empty, 1.0, score_sum))) * 0.6931471805599453
    return tl.where(is_empty, float("-inf"), value)


@triton.jit
def end_rows(
    score_max,  # [m] f32 base 2
    score_sum,  # [m] f32
    sinks_ptr,  # [q_heads], natural, with HAS_SINKS only
    q_heads,  # [m]
    keep_m,  # [m]
    value_scale,  # f32, what V is a multiple of
    HAS_SINKS: tl.constexpr,
):
    """The factor [m] that turns accumulated values into the output, and the natural log-sum-exp [m].

    Both ways to end a row, a single split and the merge of several, come through here, so that they round
    alike. The sink joins here and nowhere else.
    """
    factor = value_scale
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + q_heads, mask=keep_m, other=float("-inf")).to(tl.float32)
        rescale, score_max, score_sum = add_sink(score_max, score_sum, sink * 1.4426950408889634)
        factor = factor * rescale
    return factor * invert_sum(score_sum), log_sum(score_max, score_sum)
