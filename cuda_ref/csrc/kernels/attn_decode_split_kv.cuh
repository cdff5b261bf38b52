// Split-KV decode in plain arithmetic: any dtype, any strides, any architecture.
//
// A group of lanes takes a key: each lane holds some runs of its row, and a few shuffles sum up the score.
// Groups keep softmax states of their own, which meet at the end: in the warp through shuffles, across warps
// through shared memory.
#pragma once

#include "csrc/kernels/attn_decode_block.cuh"
#include "csrc/kernels/attn_decode_merge.cuh"
#include "csrc/kernels/attn_softmax.cuh"
#include "csrc/kernels/device.cuh"

namespace astrai {

template <class T, int HEAD_DIM>
struct ScalarDecodeShape {
    static_assert(HEAD_DIM % 32 == 0, "four lanes share a row in runs of eight");
    static constexpr int WARPS = 4;
    static constexpr int THREADS = WARPS * WARP_SIZE;
    // Eight lanes with 16-bit elements read a whole line of 128 bytes.
    static constexpr int LANES = HEAD_DIM % 64 == 0 ? 8 : 4;
    static constexpr int GROUPS = WARP_SIZE / LANES;
    static constexpr int RUNS = HEAD_DIM / RUN / LANES;
    // Accumulators of all heads take at most 64 registers.
    static constexpr int HEADS = RUNS * RUN * 4 <= 64 ? 4 : 2;
    // Keys of a group in flight at once: 64 bytes of K and of V a lane where they fit into registers.
    static constexpr int KEYS_THAT_FIT = 8 / (RUNS * static_cast<int>(sizeof(T)));
    static constexpr int KEYS = KEYS_THAT_FIT > 1 ? KEYS_THAT_FIT : 1;
    static constexpr int KEYS_OF_WARP = GROUPS * KEYS;

    using States = WarpStates<WARPS, HEADS, HEAD_DIM>;
    static constexpr int NUM_Q = HEADS * HEAD_DIM;
    static constexpr int SHARED_BYTES = (NUM_Q + States::NUM_VALUES + States::NUM_SCALARS) * sizeof(float);
};

// Softmax over the keys of one group of lanes, and this lane's columns of the values: runs lane, lane +
// LANES, ...
template <class T, int HEAD_DIM>
struct GroupStates {
    using Shape = ScalarDecodeShape<T, HEAD_DIM>;
    static constexpr int HEADS = Shape::HEADS, RUNS = Shape::RUNS, LANES = Shape::LANES, KEYS = Shape::KEYS;

    SoftmaxState softmax[HEADS];
    float values[HEADS][RUNS][RUN];

    ASTRAI_DEVICE GroupStates() {
        ASTRAI_UNROLL
        for (int head = 0; head < HEADS; ++head) {
            softmax[head] = {-INFINITY, 0.0f};
            ASTRAI_UNROLL
            for (int i = 0; i < RUNS * RUN; ++i) {
                values[head][i / RUN][i % RUN] = 0.0f;
            }
        }
    }

    // First column of a run of this lane.
    ASTRAI_DEVICE static int column(int run) { return (threadIdx.x % LANES + run * LANES) * RUN; }

    // q k of one head and the key of this group.
    ASTRAI_DEVICE static float multiply(Shared<float> q, int head, const T (&k)[RUNS][RUN]) {
        float product = 0.0f;
        ASTRAI_UNROLL
        for (int run = 0; run < RUNS; ++run) {
            ASTRAI_UNROLL
            for (int half = 0; half < RUN; half += 4) {
                float part[4];
                const Bytes16 bytes = q.load_as<Bytes16>(head * HEAD_DIM + column(run) + half);
                memcpy(part, &bytes, sizeof(part));
                ASTRAI_UNROLL
                for (int i = 0; i < 4; ++i) {
                    product = fmaf(part[i], to_float(k[run][half + i]), product);
                }
            }
        }
        ASTRAI_UNROLL
        for (int distance = LANES / 2; distance > 0; distance /= 2) {
            product += __shfl_xor_sync(FULL_WARP, product, distance);
        }
        return product;
    }

    // Scores are -inf for keys that are not to be attended to, whose v is 0.
    ASTRAI_DEVICE void add_keys(int head, const float (&scores)[KEYS], const T (&v)[KEYS][RUNS][RUN]) {
        float maximum = softmax[head].maximum;
        ASTRAI_UNROLL
        for (int key = 0; key < KEYS; ++key) {
            maximum = fmaxf(maximum, scores[key]);
        }
        const float base = softmax_base(maximum);
        rescale(head, maximum, exp2f(softmax[head].maximum - base));
        ASTRAI_UNROLL
        for (int key = 0; key < KEYS; ++key) {
            const float weight = exp2f(scores[key] - base);
            softmax[head].sum += weight;
            ASTRAI_UNROLL
            for (int i = 0; i < RUNS * RUN; ++i) {
                float& value = values[head][i / RUN][i % RUN];
                value = fmaf(weight, to_float(v[key][i / RUN][i % RUN]), value);
            }
        }
    }

    // Joins the states of the groups of the warp; every lane holds the result.
    ASTRAI_DEVICE void merge_groups(int head) {
        ASTRAI_UNROLL
        for (int distance = LANES; distance < WARP_SIZE; distance *= 2) {
            const float maximum =
                fmaxf(softmax[head].maximum, __shfl_xor_sync(FULL_WARP, softmax[head].maximum, distance));
            rescale(head, maximum, exp2f(softmax[head].maximum - softmax_base(maximum)));
            softmax[head].sum += __shfl_xor_sync(FULL_WARP, softmax[head].sum, distance);
            ASTRAI_UNROLL
            for (int i = 0; i < RUNS * RUN; ++i) {
                float& value = values[head][i / RUN][i % RUN];
                value += __shfl_xor_sync(FULL_WARP, value, distance);
            }
        }
    }

private:
    ASTRAI_DEVICE void rescale(int head, float maximum, float factor) {
        softmax[head].maximum = maximum;
        softmax[head].sum *= factor;
        ASTRAI_UNROLL
        for (int i = 0; i < RUNS * RUN; ++i) {
            values[head][i / RUN][i % RUN] *= factor;
        }
    }
};

namespace detail {

// Runs of a row that this lane holds; zeros beyond dim, or where nothing is to be kept, and nothing is read.
template <class T, int RUNS, int LANES>
ASTRAI_DEVICE void load_lane_runs(T (&runs)[RUNS][RUN], const T* row, int dim, bool keep, bool is_aligned) {
    ASTRAI_UNROLL
    for (int run = 0; run < RUNS; ++run) {
        const int column = (threadIdx.x % LANES + run * LANES) * RUN;
        if (keep && column < dim) {
            load_run(runs[run], row + column, is_aligned);
        } else {
            ASTRAI_UNROLL
            for (int i = 0; i < RUN; ++i) {
                runs[run][i] = from_float<T>(0.0f);
            }
        }
    }
}

template <class T, int HEAD_DIM, class Block>
ASTRAI_DEVICE void load_scalar_q(const Block& block, Shared<float> q) {
    const AttnParams& params = block.params;
    const T* rows = static_cast<const T*>(params.q) + block.batch * params.q_stride_b;
    for (int i = threadIdx.x; i < block.num_heads * HEAD_DIM; i += blockDim.x) {
        const int head = i / HEAD_DIM, column = i % HEAD_DIM;
        const T* row = rows + (block.first_head + head) * params.q_stride_h;
        q.store(i, column < params.head_dim ? to_float(load_global(row + column)) : 0.0f);
    }
}

// Slots of the keys of this group; the first of the warp's keys stands at position.
template <int KEYS, int LANES, class Block>
ASTRAI_DEVICE void load_slots(int (&slots)[KEYS], const Block& block, int position) {
    const int group = threadIdx.x % WARP_SIZE / LANES;
    ASTRAI_UNROLL
    for (int key = 0; key < KEYS; ++key) {
        slots[key] = block.slot(position + key * (WARP_SIZE / LANES) + group);
    }
}

template <class T, int HEAD_DIM, class Block>
ASTRAI_DEVICE void add_scalar_keys(GroupStates<T, HEAD_DIM>& states, const Block& block, Shared<float> q,
                                   const int (&slots)[GroupStates<T, HEAD_DIM>::KEYS], int position,
                                   const ScoreMap& score_map, bool is_aligned) {
    using Shape = ScalarDecodeShape<T, HEAD_DIM>;
    const int group = threadIdx.x % WARP_SIZE / Shape::LANES;
    T k[Shape::KEYS][Shape::RUNS][RUN], v[Shape::KEYS][Shape::RUNS][RUN];
    ASTRAI_UNROLL
    for (int key = 0; key < Shape::KEYS; ++key) {
        const bool is_new = block.is_new(position + key * Shape::GROUPS + group);
        const T* k_row = is_new ? block.template new_k_row<T>() : block.template k_row<T>(slots[key]);
        const T* v_row = is_new ? block.template new_v_row<T>() : block.template v_row<T>(slots[key]);
        const bool keep = slots[key] >= 0;
        load_lane_runs<T, Shape::RUNS, Shape::LANES>(k[key], k_row, block.params.head_dim, keep, is_aligned);
        load_lane_runs<T, Shape::RUNS, Shape::LANES>(v[key], v_row, block.params.value_dim, keep, is_aligned);
    }
    ASTRAI_UNROLL
    for (int head = 0; head < Shape::HEADS; ++head) {
        if (head < block.num_heads) {
            float scores[Shape::KEYS];
            ASTRAI_UNROLL
            for (int key = 0; key < Shape::KEYS; ++key) {
                const float product = states.multiply(q, head, k[key]);
                scores[key] = slots[key] >= 0 ? score_map(product) : -INFINITY;
            }
            states.add_keys(head, scores, v);
        }
    }
}

}  // namespace detail

// Grid: as DecodeBlock reads it.
template <class T, int HEAD_DIM, class KV>
ASTRAI_GLOBAL((ScalarDecodeShape<T, HEAD_DIM>::THREADS))
attn_decode_split_kv(const AttnParams params) {
    using Shape = ScalarDecodeShape<T, HEAD_DIM>;
    const DecodeBlock<KV, Shape::HEADS> block(params);
    const bool is_aligned = has_aligned_keys(params, sizeof(T));
    block.template store_new_token<T>(is_aligned);
    if (block.is_empty() && params.num_splits > 1) {
        store_empty_split(block);
        return;
    }
    Shared<float> q = shared_array<float>(0, Shape::NUM_Q);
    detail::load_scalar_q<T, HEAD_DIM>(block, q);
    __syncthreads();

    const ScoreMap score_map(params);
    const int warp = threadIdx.x / WARP_SIZE;
    GroupStates<T, HEAD_DIM> states;
    int slots[Shape::KEYS], next_slots[Shape::KEYS];
    int position = block.begin + warp * Shape::KEYS_OF_WARP;
    detail::load_slots<Shape::KEYS, Shape::LANES>(slots, block, position);
    while (position < block.end) {
        const int next_position = position + Shape::WARPS * Shape::KEYS_OF_WARP;
        detail::load_slots<Shape::KEYS, Shape::LANES>(next_slots, block, next_position);
        detail::add_scalar_keys(states, block, q, slots, position, score_map, is_aligned);
        ASTRAI_UNROLL
        for (int key = 0; key < Shape::KEYS; ++key) {
            slots[key] = next_slots[key];
        }
        position = next_position;
    }

    constexpr int FLOAT_BYTES = sizeof(float);
    const typename Shape::States shared{
        shared_array<float>(Shape::NUM_Q * FLOAT_BYTES, Shape::States::NUM_VALUES),
        shared_array<float>((Shape::NUM_Q + Shape::States::NUM_VALUES) * FLOAT_BYTES,
                            Shape::States::NUM_SCALARS)};
    const int lane = threadIdx.x % WARP_SIZE;
    ASTRAI_UNROLL
    for (int head = 0; head < Shape::HEADS; ++head) {
        states.merge_groups(head);
        if (lane == 0) {
            shared.store_state(warp, head, states.softmax[head]);
        }
        ASTRAI_UNROLL
        for (int i = 0; i < Shape::RUNS * RUN; ++i) {
            if (lane < Shape::LANES) {
                shared.store_value(warp, head, states.column(i / RUN) + i % RUN,
                                   states.values[head][i / RUN][i % RUN]);
            }
        }
    }
    __syncthreads();
    store_block_result<T>(block, shared);
}

}  // namespace astrai
