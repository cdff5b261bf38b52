// Prefill on tensor cores, sm_80 and later: split over rows of q, 16-bit dtypes, rows aligned to 16 bytes.
//
// Four warps hold 16 rows of one q head each and walk over the keys that some row of the tile sees. While
// they multiply one tile of K and V, cp.async brings the next, and the slots of the one after are read.
// Scores stay in registers: the accumulators of Q K are the left operand of P V.
#pragma once

#include "csrc/kernels/attn_prefill_tiles.cuh"

namespace astrai {
namespace prefill {

// The 16 rows of a warp. Of an accumulator a lane holds elements 0 and 1 in row lane / 4 and elements 2 and 3
// in row lane / 4 + 8, in columns 2 (lane % 4) and the next.
template <class T, int HEAD_DIM, class Q, class KV>
struct MmaPrefill {
    using Shape = MmaShape<T, HEAD_DIM>;
    using Tile = typename Shape::Tile;
    using Tiles = KvTiles<T, HEAD_DIM, Q, KV>;
    static constexpr int KEYS = Shape::KEYS;
    static constexpr int KEY_GROUPS = KEYS / 8;
    static constexpr int COL_GROUPS = HEAD_DIM / 8;

    const AttnParams& params;
    const Q& schedule;
    const KV& kv;
    Tiles& tiles;
    const int q_head;
    const int lane = threadIdx.x % WARP_SIZE;
    const int row_in_tile = threadIdx.x / WARP_SIZE * Shape::ROWS_OF_WARP;  // the first one
    const RowSpan rows;  // its keys mean nothing unless has_rows
    const bool has_rows;

    uint32_t q_frags[Shape::Q_STEPS][4];
    float acc[COL_GROUPS][4];
    SoftmaxState softmax[2];  // the sum is that over the columns of this lane

    ASTRAI_DEVICE MmaPrefill(const AttnParams& p, const Q& q, const KV& keys, Tiles& kv_tiles, int head)
        : params(p), schedule(q), kv(keys), tiles(kv_tiles), q_head(head),
          rows(p, q.q_len, keys.kv_len, kv_tiles.first_row + row_in_tile, Shape::ROWS_OF_WARP),
          has_rows(kv_tiles.first_row + row_in_tile < q.q_len) {
        SoftmaxState start = start_softmax(params, q_head);
        start.sum = lane % 4 == 0 ? start.sum : 0.0f;
        softmax[0] = softmax[1] = start;
        ASTRAI_UNROLL
        for (int c = 0; c < COL_GROUPS; ++c) {
            acc[c][0] = acc[c][1] = acc[c][2] = acc[c][3] = 0.0f;
        }
    }

    ASTRAI_DEVICE int row_of_half(int half) const { return rows.first + half * 8 + lane / 4; }

    ASTRAI_DEVICE void load_q() {
        ASTRAI_UNROLL
        for (int step = 0; step < Shape::Q_STEPS; ++step) {
            load_left(q_frags[step], Tiles::q(), row_in_tile, step * 16);
        }
    }

    ASTRAI_DEVICE void multiply_qk(float (&scores)[KEY_GROUPS][4], Tile k) const {
        ASTRAI_UNROLL
        for (int i = 0; i < KEY_GROUPS; ++i) {
            scores[i][0] = scores[i][1] = scores[i][2] = scores[i][3] = 0.0f;
        }
        ASTRAI_UNROLL
        for (int step = 0; step < HEAD_DIM / 16; ++step) {
            uint32_t a[4];
            if constexpr (Shape::IS_Q_IN_REGISTERS) {
                a[0] = q_frags[step][0], a[1] = q_frags[step][1], a[2] = q_frags[step][2],
                a[3] = q_frags[step][3];
            } else {
                load_left(a, Tiles::q(), row_in_tile, step * 16);
            }
            ASTRAI_UNROLL
            for (int i = 0; i < KEY_GROUPS; i += 2) {
                uint32_t b[2][2];
                load_right_transposed(b, k, i * 8, step * 16);
                mma_m16n8k16<T>(scores[i], a, b[0]);
                mma_m16n8k16<T>(scores[i + 1], a, b[1]);
            }
        }
    }

    // Bit 4 i + e: element e of accumulator i is in the window of its row.
    ASTRAI_DEVICE uint32_t find_windows(int begin) const {
        uint32_t visible = 0;
        ASTRAI_UNROLL
        for (int half = 0; half < 2; ++half) {
            const KeyRange window = window_of_row(params, schedule.q_len, kv.kv_len, row_of_half(half));
            ASTRAI_UNROLL
            for (int i = 0; i < KEY_GROUPS; ++i) {
                const int key = begin + i * 8 + lane % 4 * 2;
                visible |= (window.has(key) ? 1u : 0u) << (i * 4 + half * 2);
                visible |= (window.has(key + 1) ? 1u : 0u) << (i * 4 + half * 2 + 1);
            }
        }
        return visible;
    }

    // Bits as in find_windows: the key has a slot.
    ASTRAI_DEVICE uint32_t find_slots(int tile) const {
        uint32_t visible = 0;
        ASTRAI_UNROLL
        for (int i = 0; i < KEY_GROUPS; ++i) {
            const int n = i * 8 + lane % 4 * 2;
            visible |= (tiles.has_slot(tile, n) ? 5u : 0u) << (i * 4);
            visible |= (tiles.has_slot(tile, n + 1) ? 10u : 0u) << (i * 4);
        }
        return visible;
    }

    ASTRAI_DEVICE void hide_scores(float (&scores)[KEY_GROUPS][4], int tile, uint32_t kept) const {
        uint32_t visible = params.mask != nullptr ? kept : find_windows(tiles.first_key(tile));
        if constexpr (KV::IS_PAGED) {
            visible &= find_slots(tile);
        }
        ASTRAI_UNROLL
        for (int i = 0; i < KEY_GROUPS; ++i) {
            ASTRAI_UNROLL
            for (int e = 0; e < 4; ++e) {
                scores[i][e] = (visible >> (i * 4 + e) & 1u) != 0 ? scores[i][e] : -INFINITY;
            }
        }
    }

    // Scores become weights; what came before is scaled to the new maximum.
    ASTRAI_DEVICE void weigh_keys(float (&scores)[KEY_GROUPS][4]) {
        ASTRAI_UNROLL
        for (int half = 0; half < 2; ++half) {
            float maximum = softmax[half].maximum;
            ASTRAI_UNROLL
            for (int i = 0; i < KEY_GROUPS; ++i) {
                maximum = fmaxf(maximum, fmaxf(scores[i][half * 2], scores[i][half * 2 + 1]));
            }
            maximum = quad_max(maximum);
            const float base = softmax_base(maximum);
            const float rescale = exp2f(softmax[half].maximum - base);
            float sum = softmax[half].sum * rescale;
            ASTRAI_UNROLL
            for (int i = 0; i < KEY_GROUPS; ++i) {
                scores[i][half * 2] = exp2f(scores[i][half * 2] - base);
                scores[i][half * 2 + 1] = exp2f(scores[i][half * 2 + 1] - base);
                sum += scores[i][half * 2] + scores[i][half * 2 + 1];
            }
            softmax[half] = {maximum, sum};
            ASTRAI_UNROLL
            for (int c = 0; c < COL_GROUPS; ++c) {
                acc[c][half * 2] *= rescale;
                acc[c][half * 2 + 1] *= rescale;
            }
        }
    }

    ASTRAI_DEVICE void accumulate_v(const float (&weights)[KEY_GROUPS][4], Tile v) {
        ASTRAI_UNROLL
        for (int i = 0; i < KEY_GROUPS; i += 2) {
            uint32_t a[4];
            pack_left<T>(a, weights[i], weights[i + 1]);
            ASTRAI_UNROLL
            for (int c = 0; c < COL_GROUPS; c += 2) {
                uint32_t b[2][2];
                load_right(b, v, i * 8, c * 8);
                mma_m16n8k16<T>(acc[c], a, b[0]);
                mma_m16n8k16<T>(acc[c + 1], a, b[1]);
            }
        }
    }

    ASTRAI_DEVICE void attend_tile(int tile, uint32_t kept) {
        const int begin = tiles.first_key(tile);
        if (!has_rows || !rows.seen_by_some.meets(begin, KEYS)) {
            return;
        }
        float scores[KEY_GROUPS][4];
        multiply_qk(scores, tiles.k(tile));
        scale_scores<KEY_GROUPS * 4>(params, scores[0]);
        if (params.mask != nullptr || !rows.seen_by_all.covers(begin, KEYS) || tiles.has_holes(tile)) {
            hide_scores(scores, tile, kept);
        }
        weigh_keys(scores);
        accumulate_v(scores, tiles.v(tile));
    }

    ASTRAI_DEVICE void attend() {
        const int num_tiles = tiles.count();
        if (num_tiles == 0) {
            return;
        }
        tiles.copy_q(q_head);
        uint32_t kept = tiles.find_keys(0);
        __syncthreads();
        tiles.copy(0);
        if constexpr (Shape::IS_Q_IN_REGISTERS) {
            cp_async_wait<1>();
            __syncthreads();
            load_q();
        }
        for (int tile = 0; tile < num_tiles; ++tile) {
            const bool has_next = tile + 1 < num_tiles;
            const uint32_t kept_next = has_next ? tiles.find_keys(tile + 1) : 0;
            cp_async_wait<0>();
            __syncthreads();
            if (has_next) {
                tiles.copy(tile + 1);
            }
            attend_tile(tile, kept);
            kept = kept_next;
        }
        __syncthreads();
    }

    // Through the rows of this warp in shared memory, so that 16 bytes leave at once.
    ASTRAI_DEVICE void store_rows(const Q& places) {
        const Tile staged = {shared_array<T>(0, Shape::ROWS * HEAD_DIM)};
        ASTRAI_UNROLL
        for (int half = 0; half < 2; ++half) {
            const SoftmaxState state = {softmax[half].maximum, quad_sum(softmax[half].sum)};
            const float scale = inverse_sum(state.sum);
            ASTRAI_UNROLL
            for (int c = 0; c < COL_GROUPS; ++c) {
                const int index = Tile::index(row_in_tile + half * 8 + lane / 4, c * 8 + lane % 4 * 2);
                staged.data.store_as(index,
                                     pack_pair<T>(acc[c][half * 2] * scale, acc[c][half * 2 + 1] * scale));
            }
            const int row = row_of_half(half);
            if (params.lse != nullptr && row < schedule.q_len && lane % 4 == 0) {
                store_global(params.lse + (places.first_token + row) * params.q_heads + q_head,
                             natural_lse(state.maximum, state.sum));
            }
        }
        __syncwarp();
        T* out = static_cast<T*>(params.out) + places.out_base + q_head * params.out_stride_h;
        for (int chunk = lane; chunk < Shape::ROWS_OF_WARP * Shape::CHUNKS; chunk += WARP_SIZE) {
            const int r = chunk / Shape::CHUNKS, col = chunk % Shape::CHUNKS * 8;
            if (rows.first + r < schedule.q_len && col < params.value_dim) {
                const auto x = staged.data.template load_as<Bytes16>(Tile::index(row_in_tile + r, col));
                store_global(reinterpret_cast<Bytes16*>(out + (rows.first + r) * params.out_stride_t + col),
                             x);
            }
        }
    }
};

}  // namespace prefill

// Grid (q tiles of the schedule, q_heads, 1).
template <class T, int HEAD_DIM, class Q, class KV>
ASTRAI_GLOBAL((prefill::MmaShape<T, HEAD_DIM>::THREADS))
attn_prefill_split_q_mma_kernel(const AttnParams params) {
    const Q schedule(params);
    if (!prefill::has_rows(schedule)) {
        return;
    }
    const KV kv(params, schedule.batch);
    const int q_head = blockIdx.y;
    const int kv_head = q_head / (params.q_heads / params.kv_heads);
    const prefill::RowSpan rows(params, schedule.q_len, kv.kv_len, schedule.tile * Q_TILE, Q_TILE);
    prefill::KvTiles<T, HEAD_DIM, Q, KV> tiles(params, schedule, kv, rows.seen_by_some, kv_head);
    prefill::MmaPrefill<T, HEAD_DIM, Q, KV> block(params, schedule, kv, tiles, q_head);
    block.attend();
    // Where the rows go is found again: kept, it would cost registers in the loop.
    block.store_rows(Q(params));
}

}  // namespace astrai
