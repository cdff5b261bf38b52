// Prefill against float64: lengths, windows, masks, sinks, holes in the table, all dtypes and variants.
//
// Everything that no row sees is NaN, as are the output and the gaps between rows.
#pragma once

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "csrc/kernels/attn_common.h"
#include "csrc/tests/test_utils.cuh"

namespace astrai {
namespace test {

enum class MaskKind { none, keys, rows };

struct PrefillCase {
    std::string name;
    std::vector<int> q_lens, kv_lens;  // of each request; all the same unless paged
    int q_heads = 4, kv_heads = 2, head_dim = 64, value_dim = 64;
    int window_left = WINDOW_MAX, window_right = 0;  // causal
    MaskKind mask = MaskKind::none;
    float softcap = 0.0f;
    bool has_sinks = false;
    bool has_holes = false;  // paged: slots negative or beyond the pool, a short table, a lost request
    int gap = 8;

    int batch() const { return static_cast<int>(q_lens.size()); }
};

constexpr uint32_t PREFILL_SEED = 20240607;

// What a row may not see on top of its window, and where the elements of a request lie.
struct PrefillPlaces {
    const PrefillCase& c;
    const bool is_paged;
    std::vector<int64_t> first_score{0};
    std::vector<int32_t> qo_indptr{0}, kv_indptr{0}, req_pool_indices, req_to_token, tile_to_batch,
        tile_to_index;
    std::vector<uint8_t> mask;  // [sum of q_len * kv_len], or [batch, kv_len] for keys
    int context = 0, num_reqs = 0, num_slots = 0;

    PrefillPlaces(const PrefillCase& prefill_case, bool paged, Random& random)
        : c(prefill_case), is_paged(paged) {
        for (int b = 0; b < c.batch(); ++b) {
            const int64_t mask_rows = c.mask == MaskKind::keys ? 1 : c.q_lens[b];
            first_score.push_back(first_score.back() + mask_rows * c.kv_lens[b]);
            qo_indptr.push_back(qo_indptr.back() + c.q_lens[b]);
            kv_indptr.push_back(kv_indptr.back() + c.kv_lens[b]);
            context = std::max(context, c.kv_lens[b]);
            for (int tile = 0; tile * Q_TILE < c.q_lens[b]; ++tile) {
                tile_to_batch.push_back(b);
                tile_to_index.push_back(tile);
            }
        }
        for (int64_t i = 0; c.mask != MaskKind::none && i < first_score.back(); ++i) {
            mask.push_back(random.below(3) != 0 ? 1 : 0);
        }
        // Keys that no row of any request keeps.
        for (int b = 0; c.mask != MaskKind::none && b < c.batch(); ++b) {
            for (int key = 0; key < c.kv_lens[b]; key += 5) {
                for (int64_t i = first_score[b] + key; i < first_score[b + 1]; i += c.kv_lens[b]) {
                    mask[i] = 0;
                }
            }
        }
        if (is_paged) {
            fill_table(random);
            add_tiles_of_nobody();
        }
    }

    void fill_table(Random& random) {
        num_reqs = c.batch() + 2;
        num_slots = kv_indptr.back() + 7;
        if (c.has_holes) {
            context -= 3;
        }
        const std::vector<int> rows = random.shuffled(num_reqs), slots = random.shuffled(num_slots);
        req_to_token.assign(static_cast<size_t>(num_reqs) * context, -1);
        for (int b = 0; b < c.batch(); ++b) {
            req_pool_indices.push_back(c.has_holes && b == 1 ? num_reqs : rows[b]);
            for (int key = 0; key < std::min(context, c.kv_lens[b]); ++key) {
                const bool is_hole = c.has_holes && random.below(6) == 0;
                const int slot =
                    is_hole ? (random.below(2) == 0 ? -1 - key : num_slots + key) : slots[kv_indptr[b] + key];
                req_to_token[static_cast<int64_t>(rows[b]) * context + key] = slot;
            }
        }
    }

    void add_tiles_of_nobody() {
        const int beyond = (c.q_lens[0] + Q_TILE - 1) / Q_TILE;
        const std::pair<int, int> nobody[] = {{-1, 0}, {c.batch(), 0}, {0, -1}, {0, 1 << 30}, {0, beyond}};
        for (const auto& [batch, index] : nobody) {
            tile_to_batch.push_back(batch);
            tile_to_index.push_back(index);
        }
    }

    // Slot of a key, -1 if it is masked for every row.
    int slot(int b, int key) const {
        if (!is_paged) {
            return key;
        }
        if (req_pool_indices[b] >= num_reqs || key >= context) {
            return -1;
        }
        const int slot = req_to_token[static_cast<int64_t>(req_pool_indices[b]) * context + key];
        return slot < num_slots ? slot : -1;
    }

    bool sees(int b, int row, int key) const {
        const int position = c.kv_lens[b] - c.q_lens[b] + row;
        if (!is_in_window(position, key, c.window_left, c.window_right) || slot(b, key) < 0) {
            return false;
        }
        const int mask_row = c.mask == MaskKind::rows ? row : 0;
        return mask.empty() ||
               mask[first_score[b] + static_cast<int64_t>(mask_row) * c.kv_lens[b] + key] != 0;
    }

    std::pair<int, int> place_of_row(int b, int row) const {
        return is_paged ? std::make_pair(0, qo_indptr[b] + row) : std::make_pair(b, row);
    }
    std::pair<int, int> place_of_key(int b, int key) const {
        return is_paged ? std::make_pair(0, slot(b, key)) : std::make_pair(b, key);
    }
};

// Keys and values that some row sees are random, the others stay NaN.
template <class T>
void fill_seen_keys(const PrefillPlaces& places, Tensor<T>& k, Tensor<T>& v, Random& random) {
    for (int b = 0; b < places.c.batch(); ++b) {
        for (int key = 0; key < places.c.kv_lens[b]; ++key) {
            bool is_seen = false;
            for (int row = 0; row < places.c.q_lens[b]; ++row) {
                is_seen = is_seen || places.sees(b, row, key);
            }
            for (int h = 0; is_seen && h < k.heads; ++h) {
                const auto [tensor_b, token] = places.place_of_key(b, key);
                random.fill_row(k, tensor_b, token, h);
                random.fill_row(v, tensor_b, token, h);
            }
        }
    }
}

template <class T>
struct PrefillTensors {
    Tensor<T> q, k, v, out;
    std::vector<float> lse, sinks;

    PrefillTensors(const PrefillPlaces& places, Random& random)
        : q(make_rows(places, places.c.head_dim)), k(make_keys(places, places.c.head_dim)),
          v(make_keys(places, places.c.value_dim)), out(make_rows(places, places.c.value_dim)),
          lse(static_cast<size_t>(places.qo_indptr.back()) * places.c.q_heads, POISON) {
        random.fill(q, 2.0f);
        fill_seen_keys(places, k, v, random);
        for (int h = 0; places.c.has_sinks && h < places.c.q_heads; ++h) {
            sinks.push_back(2.0f * random.uniform());
        }
    }

    static Tensor<T> make_rows(const PrefillPlaces& places, int dim) {
        const PrefillCase& c = places.c;
        return places.is_paged ? Tensor<T>(1, places.qo_indptr.back(), c.q_heads, dim, c.gap)
                               : Tensor<T>(c.batch(), c.q_lens[0], c.q_heads, dim, c.gap);
    }
    static Tensor<T> make_keys(const PrefillPlaces& places, int dim) {
        const PrefillCase& c = places.c;
        return places.is_paged ? Tensor<T>(1, places.num_slots, c.kv_heads, dim, c.gap)
                               : Tensor<T>(c.batch(), c.kv_lens[0], c.kv_heads, dim, c.gap);
    }
};

inline float scale_of(const PrefillCase& c) { return 1.0f / std::sqrt(static_cast<float>(c.head_dim)); }

template <class T>
AttnParams make_prefill_params(const PrefillPlaces& places, const PrefillTensors<T>& tensors) {
    const PrefillCase& c = places.c;
    AttnParams p;
    p.q_stride_b = tensors.q.stride_b, p.q_stride_t = tensors.q.stride_t, p.q_stride_h = tensors.q.stride_h;
    p.k_stride_b = tensors.k.stride_b, p.k_stride_n = tensors.k.stride_t, p.k_stride_h = tensors.k.stride_h;
    p.v_stride_b = tensors.v.stride_b, p.v_stride_n = tensors.v.stride_t, p.v_stride_h = tensors.v.stride_h;
    p.out_stride_b = tensors.out.stride_b, p.out_stride_t = tensors.out.stride_t,
    p.out_stride_h = tensors.out.stride_h;
    p.batch = c.batch(), p.q_heads = c.q_heads, p.kv_heads = c.kv_heads;
    p.head_dim = c.head_dim, p.value_dim = c.value_dim;
    p.window_left = c.window_left, p.window_right = c.window_right;
    p.score_scale = scale_of(c), p.softcap = c.softcap;
    if (places.is_paged) {
        p.table_stride_r = places.context, p.table_stride_n = 1;
        p.num_reqs = places.num_reqs, p.context = places.context, p.num_slots = places.num_slots;
        p.num_q_tiles = static_cast<int>(places.tile_to_batch.size());
    } else {
        p.q_len = c.q_lens[0], p.kv_len = c.kv_lens[0];
        p.mask_stride_n = 1, p.mask_stride_t = c.mask == MaskKind::rows ? p.kv_len : 0;
        p.mask_stride_b = c.mask == MaskKind::rows ? static_cast<int64_t>(p.q_len) * p.kv_len : p.kv_len;
    }
    return p;
}

using PrefillEntry = void (*)(const AttnParams&, Dtype, Variant, void*);

// Runs the kernel on copies of the inputs and keeps its outputs.
template <class T>
void run_prefill(PrefillEntry entry, Variant variant, const PrefillPlaces& places,
                 PrefillTensors<T>& tensors) {
    DeviceBuffer<T> q(tensors.q.elements), k(tensors.k.elements), v(tensors.v.elements),
        out(tensors.out.elements);
    DeviceBuffer<float> lse(tensors.lse), sinks(tensors.sinks);
    DeviceBuffer<uint8_t> mask(places.mask);
    DeviceBuffer<int64_t> mask_indptr(places.first_score);
    DeviceBuffer<int32_t> qo_indptr(places.qo_indptr), kv_indptr(places.kv_indptr),
        table(places.req_to_token), req_pool_indices(places.req_pool_indices),
        tile_to_batch(places.tile_to_batch), tile_to_index(places.tile_to_index);
    AttnParams p = make_prefill_params(places, tensors);
    p.q = q.data(), p.k = k.data(), p.v = v.data(), p.out = out.data(), p.lse = lse.data();
    p.sinks = tensors.sinks.empty() ? nullptr : sinks.data();
    p.mask = places.mask.empty() ? nullptr : mask.data();
    if (places.is_paged) {
        p.mask_indptr = p.mask == nullptr ? nullptr : mask_indptr.data();
        p.qo_indptr = qo_indptr.data(), p.kv_indptr = kv_indptr.data(), p.req_to_token = table.data();
        p.req_pool_indices = req_pool_indices.data();
        p.q_tile_to_batch = tile_to_batch.data(), p.q_tile_to_index = tile_to_index.data();
    }
    entry(p, DtypeOf<T>::value, variant, nullptr);
    tensors.out.elements = out.read();
    tensors.lse = lse.read();
}

template <class T>
Row expect_row(const PrefillPlaces& places, const PrefillTensors<T>& tensors, int b, int row, int q_head) {
    const PrefillCase& c = places.c;
    const int kv_head = q_head / (c.q_heads / c.kv_heads);
    std::vector<Key> keys;
    for (int key = 0; key < c.kv_lens[b]; ++key) {
        if (places.sees(b, row, key)) {
            const auto [tensor_b, token] = places.place_of_key(b, key);
            keys.push_back(
                {tensors.k.read(tensor_b, token, kv_head), tensors.v.read(tensor_b, token, kv_head)});
        }
    }
    const auto [tensor_b, token] = places.place_of_row(b, row);
    const ScoreRule rule{scale_of(c), c.softcap, tensors.sinks.empty() ? nullptr : &tensors.sinks[q_head]};
    return attend(tensors.q.read(tensor_b, token, q_head), keys, c.value_dim, rule);
}

template <class T>
void run_prefill_case(Table& table, PrefillEntry entry, Variant variant, const PrefillCase& c,
                      bool is_paged) {
    Random random(PREFILL_SEED);
    const PrefillPlaces places(c, is_paged, random);
    PrefillTensors<T> tensors(places, random);
    run_prefill(entry, variant, places, tensors);
    Worst out, lse;
    for (int b = 0; b < c.batch(); ++b) {
        for (int row = 0; row < c.q_lens[b]; ++row) {
            for (int h = 0; h < c.q_heads; ++h) {
                const Row want = expect_row(places, tensors, b, row, h);
                const auto [tensor_b, token] = places.place_of_row(b, row);
                const std::vector<float> got = tensors.out.read(tensor_b, token, h);
                for (int d = 0; d < c.value_dim; ++d) {
                    out.add(got[d], want.out[d]);
                }
                lse.add(tensors.lse[static_cast<int64_t>(places.qo_indptr[b] + row) * c.q_heads + h],
                        want.lse);
            }
        }
    }
    const std::string name = std::string(is_paged ? "paged prefill " : "prefill ") + name_of(variant) + " " +
                             DtypeOf<T>::name + " " + c.name;
    table.add(name, out, lse, DtypeOf<T>::tolerance);
}

// One case in every dtype and variant that has a kernel.
inline void run_prefill_everywhere(Table& table, PrefillEntry entry, const PrefillCase& c, bool is_paged) {
    run_prefill_case<float>(table, entry, Variant::scalar, c, is_paged);
    run_prefill_case<f16>(table, entry, Variant::scalar, c, is_paged);
    run_prefill_case<bf16>(table, entry, Variant::scalar, c, is_paged);
#if !defined(ASTRAI_NO_MMA)
    run_prefill_case<f16>(table, entry, Variant::mma, c, is_paged);
    run_prefill_case<bf16>(table, entry, Variant::mma, c, is_paged);
#endif
}

inline PrefillCase make_prefill_case(std::string name, std::vector<int> q_lens, std::vector<int> kv_lens) {
    PrefillCase c;
    c.name = std::move(name), c.q_lens = std::move(q_lens), c.kv_lens = std::move(kv_lens);
    return c;
}

// What holds for both layouts; lengths are the caller's.
inline std::vector<PrefillCase> make_prefill_cases(const std::vector<int>& q_lens,
                                                   const std::vector<int>& kv_lens) {
    std::vector<PrefillCase> cases;
    const auto add = [&](const char* name) -> PrefillCase& {
        cases.push_back(make_prefill_case(name, q_lens, kv_lens));
        return cases.back();
    };
    add("causal");
    add("bidirectional").window_right = WINDOW_MAX;
    PrefillCase& window = add("window 20 left, 3 right");
    window.window_left = 20, window.window_right = 3;
    add("causal window 0: each row sees itself").window_left = 0;
    PrefillCase& sinks = add("causal, softcap, sinks");
    sinks.softcap = 3.0f, sinks.has_sinks = true;
    add("causal, mask of rows").mask = MaskKind::rows;
    PrefillCase& masked = add("window, mask of rows, softcap, sinks, 8 / 1 heads");
    masked.mask = MaskKind::rows, masked.window_left = 37, masked.window_right = 9, masked.softcap = 2.0f;
    masked.has_sinks = true, masked.q_heads = 8, masked.kv_heads = 1;
    const std::pair<int, int> dims[] = {{16, 24}, {32, 16}, {80, 96}, {128, 128}, {192, 128}, {200, 256}};
    for (const auto& [head_dim, value_dim] : dims) {
        PrefillCase& c = add("");
        c.name = "causal, dims " + std::to_string(head_dim) + " / " + std::to_string(value_dim);
        c.head_dim = head_dim, c.value_dim = value_dim, c.q_heads = 2, c.kv_heads = 1;
    }
    return cases;
}

// Calls that the mma variant must refuse, by argument.
inline void run_prefill_refusals(Table& table, PrefillEntry entry, const char* layout) {
    AttnParams aligned;
    aligned.batch = aligned.q_heads = aligned.kv_heads = 2, aligned.head_dim = aligned.value_dim = 64;
    aligned.q_len = aligned.kv_len = 3, aligned.num_slots = 3;
    const auto refuses = [&](const std::string& argument, Dtype dtype, Variant variant, auto change) {
        AttnParams p = aligned;
        change(p);
        table.add(std::string(layout) + " refuses " + argument + " for " + name_of(variant),
                  raises_for(argument, [&] { entry(p, dtype, variant, nullptr); }));
    };
    [[maybe_unused]] const auto misplaced = reinterpret_cast<void*>(static_cast<uintptr_t>(8));
    refuses("head_dim", Dtype::f32, Variant::scalar, [](AttnParams& p) { p.head_dim = 20; });
    refuses("value_dim", Dtype::f32, Variant::scalar, [](AttnParams& p) { p.value_dim = 0; });
    refuses("head_dim", Dtype::f32, Variant::scalar, [](AttnParams& p) { p.head_dim = 1 << 20; });
    refuses("q_heads", Dtype::f32, Variant::scalar, [](AttnParams& p) { p.q_heads = 3; });
#if !defined(ASTRAI_NO_MMA)
    refuses("dtype", Dtype::f32, Variant::mma, [](AttnParams&) {});
    refuses("q", Dtype::f16, Variant::mma, [=](AttnParams& p) { p.q = misplaced; });
    refuses("q", Dtype::f16, Variant::mma, [](AttnParams& p) { p.q_stride_t = 132; });
    refuses("k", Dtype::bf16, Variant::mma, [=](AttnParams& p) { p.k = misplaced; });
    refuses("k", Dtype::bf16, Variant::mma, [](AttnParams& p) { p.k_stride_h = 68; });
    refuses("v", Dtype::f16, Variant::mma, [](AttnParams& p) { p.v_stride_n = 4; });
    refuses("out", Dtype::f16, Variant::mma, [](AttnParams& p) { p.out_stride_h = 1; });
#else
    refuses("variant", Dtype::f16, Variant::mma, [](AttnParams&) {});
#endif
}

inline void run_prefill_cases(Table& table) {
    std::vector<PrefillCase> cases = make_prefill_cases({70, 70}, {130, 130});
    PrefillCase keys = make_prefill_case("causal, mask of keys", {70, 70}, {150, 150});
    keys.mask = MaskKind::keys;
    cases.push_back(keys);
    // The first row of 5 of 67 sees one key less than a tile.
    const std::pair<int, int> lengths[] = {{1, 1}, {2, 3}, {3, 2}, {5, 64}, {5, 67}, {64, 5},
                                           {65, 300}, {1, 0}, {0, 4}, {0, 0}};
    for (const auto& [q_len, kv_len] : lengths) {
        const std::string name = "causal, " + std::to_string(q_len) + " rows of " + std::to_string(kv_len);
        cases.push_back(make_prefill_case(name, {q_len, q_len, q_len}, {kv_len, kv_len, kv_len}));
    }
    // The second row does not see the first key of the tile.
    PrefillCase shifted = make_prefill_case("window 100 left, q_len 2, kv_len 200", {2}, {200});
    shifted.window_left = 100, shifted.window_right = WINDOW_MAX;
    cases.push_back(shifted);
    PrefillCase sink_alone = make_prefill_case("no keys, sinks", {3}, {0});
    sink_alone.has_sinks = true;
    cases.push_back(sink_alone);
    for (const PrefillCase& c : cases) {
        run_prefill_everywhere(table, attn_prefill, c, false);
    }
    PrefillCase odd = make_prefill_case("causal, rows at odd addresses", {9}, {20});
    odd.gap = 3;
    run_prefill_case<bf16>(table, attn_prefill, Variant::scalar, odd, false);
    run_prefill_refusals(table, attn_prefill, "prefill");
}

inline void run_paged_prefill_cases(Table& table) {
    const std::vector<int> q_lens = {1, 70, 0, 3, 9, 66}, kv_lens = {75, 130, 8, 0, 4, 66};
    std::vector<PrefillCase> cases = make_prefill_cases(q_lens, kv_lens);
    PrefillCase holes = make_prefill_case("causal, holes in the table", q_lens, kv_lens);
    holes.has_holes = true;
    cases.push_back(holes);
    holes.name = "window, mask of rows, holes in the table, sinks";
    holes.window_left = 40, holes.window_right = 2, holes.mask = MaskKind::rows, holes.has_sinks = true;
    cases.push_back(holes);
    cases.push_back(make_prefill_case("no rows", {0, 0}, {3, 0}));
    for (const PrefillCase& c : cases) {
        run_prefill_everywhere(table, attn_paged_prefill, c, true);
    }
    run_prefill_refusals(table, attn_paged_prefill, "paged prefill");
}

}  // namespace test
}  // namespace astrai
