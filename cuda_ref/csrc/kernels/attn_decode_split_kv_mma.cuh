// Split-KV decode on tensor cores, sm_80 and later.
//
// The query heads of a KV head are the rows of a tile of 16. Each warp walks tiles of 16 keys of its own: K
// and V come through a ring of shared buffers that only this warp fills and reads, so warps never wait for
// each other before their states meet at the end.
#pragma once

#if !defined(ASTRAI_NO_MMA)

#include <type_traits>

#include "csrc/kernels/attn_decode_block.cuh"
#include "csrc/kernels/attn_decode_merge.cuh"
#include "csrc/kernels/attn_mma_utils.cuh"
#include "csrc/kernels/attn_softmax.cuh"
#include "csrc/kernels/attn_warp_utils.cuh"
#include "csrc/kernels/device.cuh"

namespace astrai {

template <int HEAD_DIM>
struct MmaDecodeShape {
    static constexpr int WARPS = 4;
    static constexpr int THREADS = WARPS * WARP_SIZE;
    static constexpr int HEADS = 16;
    static constexpr int KEYS = 16;  // of a tile
    // Tiles whose K and V are on their way while one is worked on. More where tiles are small: a block has
    // about 32 KB in flight, and at least two blocks fit an SM with 100 KB for head dims up to 128.
    static constexpr int AHEAD = HEAD_DIM <= 32 ? 3 : HEAD_DIM <= 64 ? 2 : 1;
    // A buffer holds K or V of one tile. One more than is on its way: the one that is being read.
    static constexpr int BUFFERS = 2 * AHEAD + 1;
    static constexpr int TILE = KEYS * HEAD_DIM;
    // Lanes that copy neighbouring bytes of a row: a line of 128 bytes where rows are made of lines.
    static constexpr int LANES_OF_ROW = HEAD_DIM % 64 == 0 ? 8 : 4;

    // The padding keeps the rows that a warp writes at once in different banks.
    using States = WarpStates<WARPS, HEADS, HEAD_DIM + 8>;
    static constexpr int RING_BYTES = BUFFERS * WARPS * TILE * 2;
    static constexpr int ROW_BYTES = WARPS * 2 * KEYS * static_cast<int>(sizeof(uint64_t));
    // Pieces of q, 16 columns wide, that do not fit into registers next to the values.
    static constexpr int SHARED_STEPS = HEAD_DIM > 192 ? 4 : 0;
    static constexpr int Q_BYTES = SHARED_STEPS * WARP_SIZE * 16;
    static constexpr int SHARED_BYTES = RING_BYTES + ROW_BYTES + Q_BYTES;
    static_assert((States::NUM_VALUES + States::NUM_SCALARS) * sizeof(float) <= RING_BYTES,
                  "states take the place of the ring");
    static_assert(SHARED_BYTES <= 99 * 1024, "what a block can have on sm_86 and sm_89");
};

// The keys of one warp on their way through shared memory.
template <class T, int HEAD_DIM, class Block>
struct KeyStream {
    using Shape = MmaDecodeShape<HEAD_DIM>;
    using Tile = SwizzledTile<T, HEAD_DIM>;
    using Seen = std::conditional_t<Shape::AHEAD == 1, uint32_t, uint64_t>;
    static_assert((Shape::AHEAD + 1) * Shape::KEYS <= 8 * sizeof(Seen), "a bit for each known key");

    const Block& block;
    int lane;
    int position;    // of the first key of the current tile; end of the block or later if there is none
    int buffer = 0;  // that is read next
    int upcoming;    // slot of key lane % KEYS of the tile after those on their way
    Seen seen = 0;   // a bit for each key of the tiles known so far, the current tile lowest
    Shared<T> ring;  // [BUFFERS, KEYS, HEAD_DIM]
    // [2, KEYS]: where K, and V, of the keys of the tile start that is copied next; 0 if masked
    Shared<uint64_t> rows;
    // Of K in the lower half of the lanes, of V in the upper.
    const T *slot_zero, *new_row;
    int64_t slot_stride;

    ASTRAI_DEVICE explicit KeyStream(const Block& b) : block(b), lane(threadIdx.x % WARP_SIZE) {
        const int warp = threadIdx.x / WARP_SIZE;
        position = b.begin + warp * Shape::KEYS;
        ring = shared_array<T>(warp * Shape::BUFFERS * Shape::TILE * 2, Shape::BUFFERS * Shape::TILE);
        rows = shared_array<uint64_t>(Shape::RING_BYTES + warp * 2 * Shape::KEYS * 8, 2 * Shape::KEYS);
        const bool is_k = lane < Shape::KEYS;
        slot_zero = is_k ? b.template k_row<T>(0) : b.template v_row<T>(0);
        new_row = is_k ? b.template new_k_row<T>() : b.template new_v_row<T>();
        slot_stride = is_k ? b.params.k_stride_n : b.params.v_stride_n;
    }

    // Keys from one tile of a warp to its next.
    static constexpr int STRIDE = Shape::WARPS * Shape::KEYS;

    ASTRAI_DEVICE bool has_tile() const { return position < block.end; }
    ASTRAI_DEVICE void go_on() { position += STRIDE; }

    // Slots behind the last key are negative.
    ASTRAI_DEVICE int load_slot(int first_key) const { return block.slot(first_key + lane % Shape::KEYS); }

    ASTRAI_DEVICE bool is_seen(int key) const { return seen >> key & 1; }

    // Each lane works out where one row starts, so that copies have nothing to work out.
    ASTRAI_DEVICE void know_tile(int first_key, int slot) {
        static_assert(WARP_SIZE == 2 * Shape::KEYS, "a lane for K and one for V of each key");
        const T* row = nullptr;
        if (slot >= 0) {
            const bool is_new = block.is_new(first_key + lane % Shape::KEYS);
            row = is_new ? new_row : slot_zero + slot * slot_stride;
        }
        const unsigned seen_of_tile = __ballot_sync(FULL_WARP, slot >= 0) & ((1u << Shape::KEYS) - 1);
        seen = seen >> Shape::KEYS | static_cast<Seen>(seen_of_tile) << (Shape::AHEAD * Shape::KEYS);
        rows.store(lane, reinterpret_cast<uint64_t>(row));
    }
    ASTRAI_DEVICE Tile tile_in(int index) const { return {ring.slice(index * Shape::TILE, Shape::TILE)}; }

    // Starts the copies of the first tiles.
    ASTRAI_DEVICE void start() {
        int slots[Shape::AHEAD];
        ASTRAI_UNROLL
        for (int tile = 0; tile < Shape::AHEAD; ++tile) {
            slots[tile] = load_slot(position + tile * STRIDE);
        }
        upcoming = load_slot(position + Shape::AHEAD * STRIDE);
        ASTRAI_UNROLL
        for (int tile = 0; tile < Shape::AHEAD; ++tile) {
            know_tile(position + tile * STRIDE, slots[tile]);
            __syncwarp();
            copy<true>(position + tile * STRIDE, 2 * tile);
            copy<false>(position + tile * STRIDE, 2 * tile + 1);
            __syncwarp();
        }
    }

    // K of the current tile, once it is there. Starts on K of a later tile, whose slots came while the tile
    // before was worked on.
    ASTRAI_DEVICE Tile next_k() {
        cp_async_wait<Shape::BUFFERS - 2>();
        know_tile(position + Shape::AHEAD * STRIDE, upcoming);
        // The warp sees what its lanes copied, and is done with the buffer that is filled next.
        __syncwarp();
        upcoming = load_slot(position + (Shape::AHEAD + 1) * STRIDE);
        return advance<true>();
    }
    ASTRAI_DEVICE Tile next_v() {
        cp_async_wait<Shape::BUFFERS - 2>();
        __syncwarp();
        const Tile v = advance<false>();
        // The warp is done with the addresses of this tile.
        __syncwarp();
        return v;
    }

private:
    template <bool IS_K>
    ASTRAI_DEVICE Tile advance() {
        const int current = buffer;
        copy<IS_K>(position + Shape::AHEAD * STRIDE, current == 0 ? Shape::BUFFERS - 1 : current - 1);
        buffer = current == Shape::BUFFERS - 1 ? 0 : current + 1;
        return tile_in(current);
    }

    // Closes a group even if there is nothing to copy: waits count groups.
    template <bool IS_K>
    ASTRAI_DEVICE void copy(int first_key, int into) const {
        constexpr int CHUNK = 8, LANES = Shape::LANES_OF_ROW, KEYS_AT_ONCE = WARP_SIZE / LANES;
        const Tile destination = tile_in(into);
        const int dim = IS_K ? block.params.head_dim : block.params.value_dim;
        if (first_key < block.end) {
            ASTRAI_UNROLL
            for (int i = 0; i < Shape::KEYS; i += KEYS_AT_ONCE) {
                const int key = i + lane / LANES;
                const uint64_t row = rows.load(IS_K ? key : Shape::KEYS + key);
                ASTRAI_UNROLL
                for (int first_chunk = 0; first_chunk < HEAD_DIM / CHUNK; first_chunk += LANES) {
                    const int column = (first_chunk + lane % LANES) * CHUNK;
                    cp_async_16(destination.data, Tile::index(key, column),
                                reinterpret_cast<const T*>(row) + column, row != 0 && column < dim);
                }
            }
        }
        cp_async_commit();
    }
};

// Softmax and values of the rows lane / 4 and lane / 4 + 8, over the keys of one warp, in the layout of
// accumulators.
template <class T, int HEAD_DIM>
struct MmaStates {
    using Shape = MmaDecodeShape<HEAD_DIM>;
    using Tile = SwizzledTile<T, HEAD_DIM>;
    static constexpr int STEPS = HEAD_DIM / 16;
    static constexpr int HELD_STEPS = STEPS - Shape::SHARED_STEPS;

    uint32_t q[HELD_STEPS][4];
    float values[2 * STEPS][4];
    float maximum[2] = {-INFINITY, -INFINITY};
    float sum[2] = {0.0f, 0.0f};  // over the columns of this lane alone

    // q comes straight from global memory: a thread needs each of its values once.
    template <class Block>
    ASTRAI_DEVICE explicit MmaStates(const Block& block) {
        ASTRAI_UNROLL
        for (int step = 0; step < HELD_STEPS; ++step) {
            load_q(q[step], block, step);
        }
        ASTRAI_UNROLL
        for (int i = 0; i < 8 * STEPS; ++i) {
            values[i / 4][i % 4] = 0.0f;
        }
        if constexpr (Shape::SHARED_STEPS > 0) {
            // All warps work on the same rows.
            if (threadIdx.x < WARP_SIZE) {
                ASTRAI_UNROLL
                for (int step = HELD_STEPS; step < STEPS; ++step) {
                    Bytes16 piece;
                    load_q(piece.word, block, step);
                    shared_q().store(shared_index(step), piece);
                }
            }
            __syncthreads();
        }
    }

    template <class Block>
    ASTRAI_DEVICE static void load_q(uint32_t (&piece)[4], const Block& block, int step) {
        const AttnParams& params = block.params;
        const int lane = threadIdx.x % WARP_SIZE;
        const T* rows = static_cast<const T*>(params.q) + block.batch * params.q_stride_b;
        ASTRAI_UNROLL
        for (int i = 0; i < 4; ++i) {
            const int head = lane / 4 + i % 2 * 8;
            const int column = step * 16 + i / 2 * 8 + lane % 4 * 2;
            const T* row = rows + (block.first_head + head) * params.q_stride_h;
            const bool keep = head < block.num_heads && column < params.head_dim;
            piece[i] = keep ? load_global(reinterpret_cast<const uint32_t*>(row + column)) : 0u;
        }
    }

    // [SHARED_STEPS, lanes]: the pieces of q as threads take them.
    ASTRAI_DEVICE static Shared<Bytes16> shared_q() {
        return shared_array<Bytes16>(Shape::RING_BYTES + Shape::ROW_BYTES, Shape::SHARED_STEPS * WARP_SIZE);
    }
    ASTRAI_DEVICE static int shared_index(int step) {
        return (step - HELD_STEPS) * WARP_SIZE + threadIdx.x % WARP_SIZE;
    }

    // Scores [16, 16] of the keys of a tile, as two accumulators.
    ASTRAI_DEVICE void multiply_k(float (&scores)[2][4], Tile k) const {
        ASTRAI_UNROLL
        for (int i = 0; i < 8; ++i) {
            scores[i / 4][i % 4] = 0.0f;
        }
        ASTRAI_UNROLL
        for (int step = 0; step < STEPS; ++step) {
            uint32_t b[2][2];
            load_right_transposed(b, k, 0, step * 16);
            if (step < HELD_STEPS) {
                multiply_piece(scores, q[step < HELD_STEPS ? step : 0], b);
            } else {
                multiply_piece(scores, shared_q().load(shared_index(step)).word, b);
            }
        }
    }

    ASTRAI_DEVICE static void multiply_piece(float (&scores)[2][4], const uint32_t (&piece)[4],
                                             const uint32_t (&b)[2][2]) {
        mma_m16n8k16<T>(scores[0], piece, b[0]);
        mma_m16n8k16<T>(scores[1], piece, b[1]);
    }

    // From scores to weights, in place; the values so far are brought to the new maximum.
    ASTRAI_DEVICE void update_softmax(float (&scores)[2][4]) {
        ASTRAI_UNROLL
        for (int half = 0; half < 2; ++half) {
            float highest = maximum[half];
            ASTRAI_UNROLL
            for (int i = 0; i < 4; ++i) {
                highest = fmaxf(highest, scores[i / 2][half * 2 + i % 2]);
            }
            highest = quad_max(highest);
            const float base = softmax_base(highest);
            const float factor = exp2f(maximum[half] - base);
            maximum[half] = highest;
            sum[half] *= factor;
            ASTRAI_UNROLL
            for (int i = 0; i < 4; ++i) {
                float& score = scores[i / 2][half * 2 + i % 2];
                score = exp2f(score - base);
                sum[half] += score;
            }
            ASTRAI_UNROLL
            for (int i = 0; i < 4 * STEPS; ++i) {
                values[i / 2][half * 2 + i % 2] *= factor;
            }
        }
    }

    ASTRAI_DEVICE void add_v(const float (&weights)[2][4], Tile v) {
        uint32_t a[4];
        pack_left<T>(a, weights[0], weights[1]);
        ASTRAI_UNROLL
        for (int step = 0; step < STEPS; ++step) {
            uint32_t b[2][2];
            load_right(b, v, 0, step * 16);
            mma_m16n8k16<T>(values[2 * step], a, b[0]);
            mma_m16n8k16<T>(values[2 * step + 1], a, b[1]);
        }
    }

    template <class States>
    ASTRAI_DEVICE void store(const States& states, int num_heads) const {
        const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
        ASTRAI_UNROLL
        for (int half = 0; half < 2; ++half) {
            const int head = lane / 4 + half * 8;
            const float row_sum = quad_sum(sum[half]);
            if (head < num_heads) {
                if (lane % 4 == 0) {
                    states.store_state(warp, head, {maximum[half], row_sum});
                }
                ASTRAI_UNROLL
                for (int i = 0; i < 4 * STEPS; ++i) {
                    states.store_value(warp, head, i / 2 * 8 + lane % 4 * 2 + i % 2,
                                       values[i / 2][half * 2 + i % 2]);
                }
            }
        }
    }
};

// Grid: as DecodeBlock reads it.
template <class T, int HEAD_DIM, class KV>
ASTRAI_GLOBAL(MmaDecodeShape<HEAD_DIM>::THREADS)
attn_decode_split_kv_mma(const AttnParams params) {
    using Shape = MmaDecodeShape<HEAD_DIM>;
    using Block = DecodeBlock<KV, Shape::HEADS>;
    const Block block(params);
    block.template store_new_token<T>(true);
    if (block.is_empty() && params.num_splits > 1) {
        store_empty_split(block);
        return;
    }
    KeyStream<T, HEAD_DIM, Block> keys(block);
    keys.start();
    MmaStates<T, HEAD_DIM> states(block);
    const ScoreMap score_map(params);
    for (; keys.has_tile(); keys.go_on()) {
        float scores[2][4];
        states.multiply_k(scores, keys.next_k());
        ASTRAI_UNROLL
        for (int i = 0; i < 8; ++i) {
            const int key = i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;  // of the tile
            float& score = scores[i / 4][i % 4];
            score = keys.is_seen(key) ? score_map(score) : -INFINITY;
        }
        states.update_softmax(scores);
        states.add_v(scores, keys.next_v());
    }

    // Every warp is done with the ring before states take its place.
    cp_async_wait<0>();
    __syncthreads();
    const typename Shape::States shared{
        shared_array<float>(0, Shape::States::NUM_VALUES),
        shared_array<float>(Shape::States::NUM_VALUES * static_cast<int>(sizeof(float)),
                            Shape::States::NUM_SCALARS)};
    states.store(shared, block.num_heads);
    __syncthreads();
    store_block_result<T>(block, shared);
}

}  // namespace astrai

#endif  // !ASTRAI_NO_MMA
