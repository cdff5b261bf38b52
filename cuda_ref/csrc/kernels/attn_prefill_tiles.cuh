// Tiles of Q, K and V in shared memory for prefill on tensor cores, and how keys get there.
#pragma once

#include "csrc/kernels/attn_layout_policies.cuh"
#include "csrc/kernels/attn_mma_utils.cuh"
#include "csrc/kernels/attn_prefill_rows.cuh"
#include "csrc/kernels/attn_warp_utils.cuh"

namespace astrai {
namespace prefill {

template <class T, int HEAD_DIM>
struct MmaShape {
    static_assert(sizeof(T) == 2, "mma multiplies 16-bit elements");
    using Tile = SwizzledTile<T, HEAD_DIM>;
    static constexpr int WARPS = 4;
    static constexpr int THREADS = WARPS * WARP_SIZE;
    static constexpr int ROWS_OF_WARP = 16;
    static constexpr int ROWS = WARPS * ROWS_OF_WARP;
    static_assert(ROWS == Q_TILE, "a block works on one q tile");

    // Beyond 128 the accumulators fill the registers: fewer keys at once, and Q is read again for each tile.
    static constexpr int KEYS = HEAD_DIM <= 128 ? 64 : 32;
    static constexpr bool IS_Q_IN_REGISTERS = HEAD_DIM <= 128;
    static constexpr int Q_STEPS = IS_Q_IN_REGISTERS ? HEAD_DIM / 16 : 1;

    static constexpr int CHUNKS = HEAD_DIM / 8;  // of 16 bytes in a row
    static constexpr int TILE_BYTES = KEYS * HEAD_DIM * 2;
    static constexpr int STAGE_BYTES = 2 * TILE_BYTES;  // K, V
    // Q that moves to registers leaves before the second stage is filled.
    static constexpr int Q_OFFSET = IS_Q_IN_REGISTERS ? STAGE_BYTES : 2 * STAGE_BYTES;
    static constexpr int SLOTS_OFFSET = 2 * STAGE_BYTES + (IS_Q_IN_REGISTERS ? 0 : ROWS * HEAD_DIM * 2);

    // Slots are written for the tile after the next one while a slower warp may attend to the one before.
    static constexpr int SLOT_STAGES = 4;
    static constexpr int KEY_WARPS = KEYS / WARP_SIZE;
    static constexpr int HOLES_OFFSET =
        SLOTS_OFFSET + SLOT_STAGES * KEYS * 4;  // [SLOT_STAGES, KEY_WARPS] int
    static constexpr int SEEN_OFFSET = HOLES_OFFSET + SLOT_STAGES * KEY_WARPS * 4;  // [2, WARPS, 4] uint32
    static constexpr int SHARED_BYTES = SEEN_OFFSET + 2 * WARPS * 4 * 4;
    static_assert(SHARED_BYTES <= 99 * 1024, "what a block may have on sm_89");
};

// Keys range.begin ... range.end - 1 of one request in tiles of KEYS, double-buffered. Every thread of the
// block calls find_keys(i), then a barrier, then copy(i) for each tile i in order; tile i is read after the
// next barrier that follows cp_async_wait, and its place is free from the one after.
template <class T, int HEAD_DIM, class Q, class KV>
struct KvTiles {
    using Shape = MmaShape<T, HEAD_DIM>;
    using Tile = typename Shape::Tile;
    static constexpr int KEYS = Shape::KEYS;

    const AttnParams& params;
    const Q& schedule;
    const KV& kv;
    const KeyRange range;
    const int kv_head;
    const int first_row;
    const int warp = threadIdx.x / WARP_SIZE;
    const int lane = threadIdx.x % WARP_SIZE;
    const Shared<int> slots = shared_array<int>(Shape::SLOTS_OFFSET, Shape::SLOT_STAGES * KEYS);
    const Shared<int> holes = shared_array<int>(Shape::HOLES_OFFSET, Shape::SLOT_STAGES * Shape::KEY_WARPS);
    const Shared<uint32_t> seen = shared_array<uint32_t>(Shape::SEEN_OFFSET, 2 * Shape::WARPS * 4);
    int next_slot = -1;  // of key thread of the tile that find_keys takes next

    ASTRAI_DEVICE KvTiles(const AttnParams& p, const Q& q, const KV& keys, KeyRange keys_range, int head)
        : params(p), schedule(q), kv(keys), range(keys_range), kv_head(head), first_row(q.tile * Q_TILE) {
        read_slot(0);
    }

    ASTRAI_DEVICE int count() const {
        return range.begin < range.end ? (range.end - range.begin + KEYS - 1) / KEYS : 0;
    }
    ASTRAI_DEVICE int first_key(int tile) const { return range.begin + tile * KEYS; }
    ASTRAI_DEVICE Tile k(int tile) const { return stage_tile(tile % 2 * Shape::STAGE_BYTES); }
    ASTRAI_DEVICE Tile v(int tile) const {
        return stage_tile(tile % 2 * Shape::STAGE_BYTES + Shape::TILE_BYTES);
    }
    ASTRAI_DEVICE static Tile q() { return {shared_array<T>(Shape::Q_OFFSET, Shape::ROWS * HEAD_DIM)}; }

    // Starts the copy of Q; rows beyond the request and columns beyond head_dim become zero.
    ASTRAI_DEVICE void copy_q(int q_head) const {
        const T* source = static_cast<const T*>(params.q) + schedule.q_base + q_head * params.q_stride_h;
        ASTRAI_NO_UNROLL
        for (int i = 0; i < Shape::ROWS * Shape::CHUNKS / Shape::THREADS; ++i) {
            const int chunk = i * Shape::THREADS + threadIdx.x;
            const int row = chunk / Shape::CHUNKS, col = chunk % Shape::CHUNKS * 8;
            const bool keep = first_row + row < schedule.q_len && col < params.head_dim;
            const int64_t offset = keep ? (first_row + row) * params.q_stride_t + col : 0;
            cp_async_16(q().data, Tile::index(row, col), source + offset, keep);
        }
        cp_async_commit();
    }

    // Finds the slots of a tile and, with a mask, which of its keys this lane's elements of the scores keep:
    // bit 4 i + e for element e of accumulator i.
    ASTRAI_DEVICE uint32_t find_keys(int tile) {
        if constexpr (KV::IS_PAGED) {
            write_slots(tile);
            read_slot(tile + 1);
        }
        if (params.mask == nullptr) {
            return 0;
        }
        const uint32_t kept = read_mask(first_key(tile));
        share_seen(tile, kept);
        return kept;
    }

    // Starts the copy of a tile. Keys that no row of the block sees are not read; they become zero, because
    // their weight 0 times NaN would be NaN.
    ASTRAI_DEVICE void copy(int tile) const {
        const Tile k_tile = k(tile), v_tile = v(tile);
        const T* k_source = static_cast<const T*>(params.k);
        const T* v_source = static_cast<const T*>(params.v);
        ASTRAI_NO_UNROLL
        for (int i = 0; i < KEYS * Shape::CHUNKS / Shape::THREADS; ++i) {
            const int chunk = i * Shape::THREADS + threadIdx.x;
            const int n = chunk / Shape::CHUNKS, col = chunk % Shape::CHUNKS * 8;
            const int slot = slot_of_block(tile, n);
            const bool keep_k = slot >= 0 && col < params.head_dim;
            const bool keep_v = slot >= 0 && col < params.value_dim;
            const int64_t k_offset = keep_k ? kv.k_offset(slot, kv_head) + col : 0;
            const int64_t v_offset = keep_v ? kv.v_offset(slot, kv_head) + col : 0;
            cp_async_16(k_tile.data, Tile::index(n, col), k_source + k_offset, keep_k);
            cp_async_16(v_tile.data, Tile::index(n, col), v_source + v_offset, keep_v);
        }
        cp_async_commit();
    }

    // Whether the tile has a key without a slot.
    ASTRAI_DEVICE bool has_holes(int tile) const {
        int count = 0;
        if constexpr (KV::IS_PAGED) {
            ASTRAI_UNROLL
            for (int w = 0; w < Shape::KEY_WARPS; ++w) {
                count += holes.load(tile % Shape::SLOT_STAGES * Shape::KEY_WARPS + w);
            }
        }
        return count != 0;
    }

    ASTRAI_DEVICE bool has_slot(int tile, int n) const {
        return !KV::IS_PAGED || slots.load(tile % Shape::SLOT_STAGES * KEYS + n) >= 0;
    }

private:
    ASTRAI_DEVICE static Tile stage_tile(int byte_offset) {
        return {shared_array<T>(byte_offset, KEYS * HEAD_DIM)};
    }

    // A tile ahead: the read is over before the slot is wanted.
    ASTRAI_DEVICE void read_slot(int tile) {
        if constexpr (KV::IS_PAGED) {
            const int key = first_key(tile) + static_cast<int>(threadIdx.x);
            next_slot = threadIdx.x < KEYS && range.has(key) ? kv.slot(key) : -1;
        }
    }

    ASTRAI_DEVICE void write_slots(int tile) const {
        if (warp < Shape::KEY_WARPS) {
            const int stage = tile % Shape::SLOT_STAGES;
            const bool has_hole = warp_max(next_slot < 0 ? 1.0f : 0.0f) > 0.0f;
            slots.store(stage * KEYS + static_cast<int>(threadIdx.x), next_slot);
            if (lane == 0) {
                holes.store(stage * Shape::KEY_WARPS + warp, has_hole ? 1 : 0);
            }
        }
    }

    ASTRAI_DEVICE uint32_t read_mask(int begin) const {
        uint32_t kept = 0;
        ASTRAI_NO_UNROLL
        for (int half = 0; half < 2; ++half) {
            const int row = first_row + warp * Shape::ROWS_OF_WARP + half * 8 + lane / 4;
            if (row >= schedule.q_len) {
                continue;
            }
            const KeyRange window = window_of_row(params, schedule.q_len, kv.kv_len, row);
            const uint8_t* mask = params.mask + schedule.mask_base + row * schedule.mask_stride_t;
            ASTRAI_NO_UNROLL
            for (int i = 0; i < KEYS / 4; ++i) {
                const int key = begin + i / 2 * 8 + lane % 4 * 2 + i % 2;
                const bool keep = window.has(key) && load_global(mask + key * schedule.mask_stride_n) != 0;
                kept |= (keep ? 1u : 0u) << (i / 2 * 4 + half * 2 + i % 2);
            }
        }
        return kept;
    }

    // Tells the other warps which keys the rows of this one keep: word c has the keys 8 i + 2 c + e at
    // bit 4 i + e.
    ASTRAI_DEVICE void share_seen(int tile, uint32_t kept) const {
        kept |= kept >> 2;
        ASTRAI_UNROLL
        for (int distance = 4; distance < WARP_SIZE; distance *= 2) {
            kept |= __shfl_xor_sync(FULL_WARP, kept, distance);
        }
        if (lane < 4) {
            seen.store((tile % 2 * Shape::WARPS + warp) * 4 + lane, kept);
        }
    }

    ASTRAI_DEVICE bool is_seen(int tile, int n) const {
        uint32_t kept = 0;
        ASTRAI_UNROLL
        for (int w = 0; w < Shape::WARPS; ++w) {
            kept |= seen.load((tile % 2 * Shape::WARPS + w) * 4 + n % 8 / 2);
        }
        return (kept >> (n / 8 * 4 + n % 2) & 1u) != 0;
    }

    // Slot of key n of a tile, -1 if no row of the block sees it.
    ASTRAI_DEVICE int slot_of_block(int tile, int n) const {
        int slot;
        if constexpr (KV::IS_PAGED) {
            slot = slots.load(tile % Shape::SLOT_STAGES * KEYS + n);
        } else {
            slot = range.has(first_key(tile) + n) ? first_key(tile) + n : -1;
        }
        return params.mask == nullptr || is_seen(tile, n) ? slot : -1;
    }
};

}  // namespace prefill
}  // namespace astrai
