// Cases of contiguous and paged decode, the same for every dtype and variant.
#pragma once

#include <string>
#include <vector>

#include "csrc/kernels/attn_common.h"
#include "csrc/tests/attn_decode_problem.cuh"
#include "csrc/tests/test_utils.cuh"

namespace astrai {
namespace test {

// Dims that are instantiated and dims that leave columns over, value dims that differ; every size of a group
// of heads: part of a tile, a whole one, more.
inline std::vector<DecodeCase> list_shape_cases() {
    struct Shape {
        int head_dim, value_dim, q_heads, kv_heads;
    };
    const Shape shapes[] = {
        {16, 16, 2, 2},  {24, 24, 4, 2},    {32, 32, 3, 1},   {40, 64, 5, 1},    {64, 64, 8, 1},
        {72, 32, 6, 2},  {80, 80, 16, 1},   {96, 96, 10, 2},  {104, 104, 20, 1}, {128, 128, 16, 2},
        {128, 64, 1, 1}, {160, 160, 4, 1},  {192, 128, 8, 1}, {192, 192, 40, 2}, {256, 256, 4, 1},
        {64, 256, 3, 3}, {256, 256, 17, 1},
    };
    std::vector<DecodeCase> cases;
    for (const Shape& shape : shapes) {
        DecodeCase c;
        c.head_dim = shape.head_dim, c.value_dim = shape.value_dim;
        c.q_heads = shape.q_heads, c.kv_heads = shape.kv_heads;
        c.kv_lens = {70, 70};
        cases.push_back(c);
    }
    return cases;
}

// Options one by one and together, over two splits and more.
inline std::vector<DecodeCase> list_option_cases() {
    std::vector<DecodeCase> cases(9);
    for (DecodeCase& c : cases) {
        c.kv_lens = {300};
    }
    cases[0].has_mask = true;
    cases[1].has_sinks = true;
    cases[2].window_left = 0;
    cases[3].window_left = 31;
    cases[4].window_left = 100;
    cases[5].softcap = 0.7f;
    cases[6].gap = 8;
    cases[7].has_lse = false;
    DecodeCase& all = cases[8];
    all.head_dim = 128, all.value_dim = 96, all.q_heads = 10, all.kv_lens = {1000, 1000};
    all.has_mask = all.has_sinks = true;
    all.window_left = 700, all.softcap = 1.5f, all.gap = 8;
    return cases;
}

// Lengths around the tiles and splits of the kernels.
inline std::vector<DecodeCase> list_length_cases() {
    std::vector<DecodeCase> cases;
    for (int kv_len : {0, 1, 2, 31, 63, 64, 65, 255, 256, 257, 1000}) {
        DecodeCase c;
        c.kv_lens = {kv_len, kv_len};
        c.has_sinks = kv_len == 0;
        cases.push_back(c);
    }
    DecodeCase no_requests;
    no_requests.kv_lens = {};
    DecodeCase nothing;
    nothing.kv_lens = {0};
    cases.push_back(no_requests);
    cases.push_back(nothing);
    return cases;
}

// What only a pool has: ragged lengths, new tokens, masked slots, a bound on the length.
inline std::vector<DecodeCase> list_pool_cases() {
    std::vector<DecodeCase> cases(13);
    for (DecodeCase& c : cases) {
        c.is_paged = true;
        c.kv_lens = {65, 0, 300, 1};
    }
    for (size_t i = 1; i < cases.size(); ++i) {
        cases[i].has_new = true;
    }
    cases[2].has_mask = true;
    cases[3].has_mask = true, cases[3].kv_lens = {7, 8, 9, 10, 11, 12, 13, 14};
    cases[4].has_holes = true, cases[4].kv_lens = {17, 4, 6, 300, 298};
    cases[5].window_left = 0;
    cases[6].window_left = 40;
    cases[7].max_kv_len = 280;
    cases[8].max_kv_len = 64;
    cases[9].q_heads = 40, cases[9].has_sinks = true;
    cases[10].head_dim = 96, cases[10].value_dim = 128, cases[10].gap = 16;
    cases[11].kv_lens = {}, cases[11].max_kv_len = 5000;
    DecodeCase& all = cases[12];
    all.kv_lens = {1000, 2, 31, 0, 63, 299}, all.q_heads = 6;
    all.has_mask = all.has_holes = all.has_sinks = true;
    all.softcap = 2.0f, all.window_left = 600;
    return cases;
}

// Rows at odd addresses, which the scalar variant alone takes.
inline DecodeCase unaligned_case(bool is_paged) {
    DecodeCase c;
    c.is_paged = is_paged, c.has_new = is_paged;
    c.kv_lens = {70, 70};
    c.gap = 3;
    return c;
}

// The bits of a request do not depend on how many splits its batch mates ask for, one or many.
template <class T>
void check_batch_invariance(Table& table, Variant variant) {
    for (bool has_sinks : {false, true}) {
        DecodeCase alone;
        alone.is_paged = true, alone.has_sinks = has_sinks, alone.kv_lens = {200};
        DecodeCase together = alone;
        together.kv_lens = {200, 900};
        DecodeProblem<T> first(alone), second(together);
        // The same seed draws other values for a larger batch: the request has to be given its own.
        second.copy_request(first);
        first.run(variant);
        second.run(variant);
        const std::vector<T> of_request(second.result().begin(),
                                        second.result().begin() + first.result().size());
        const std::vector<float> lse_of_request(second.lse().begin(),
                                                second.lse().begin() + first.lse().size());
        table.add(std::string("same bits in any batch ") + name_of(variant) + " " + DtypeOf<T>::name +
                      (has_sinks ? " sinks" : ""),
                  has_same_bytes(first.result(), of_request) && has_same_bytes(first.lse(), lse_of_request));
    }
}

template <class T>
void check_variant(Table& table, Variant variant, const std::vector<DecodeCase>& cases) {
    uint32_t seed = 0;
    for (const DecodeCase& c : cases) {
        DecodeProblem<T>(c, ++seed).check(table, variant);
    }
}

inline void check_all_variants(Table& table, const std::vector<DecodeCase>& cases) {
    check_variant<float>(table, Variant::scalar, cases);
    check_variant<f16>(table, Variant::scalar, cases);
    check_variant<bf16>(table, Variant::scalar, cases);
#if !defined(ASTRAI_NO_MMA)
    check_variant<f16>(table, Variant::mma, cases);
    check_variant<bf16>(table, Variant::mma, cases);
#endif
}

// Calls that no kernel takes name the argument that is at fault, before anything runs.
inline void check_decode_errors(Table& table) {
    const auto raises = [](const char* argument, Dtype dtype, Variant variant, auto change) {
        AttnParams params;
        params.batch = 2, params.q_heads = 4, params.kv_heads = 2, params.head_dim = params.value_dim = 64;
        params.kv_len = params.max_kv_len = 3;
        change(params);
        return raises_for(argument, [&] { attn_decode(params, dtype, variant, nullptr); });
    };
    table.add("q_heads that no KV head divides",
              raises("q_heads", Dtype::bf16, Variant::scalar, [](AttnParams& p) { p.q_heads = 3; }));
    table.add("a head_dim that no kernel holds",
              raises("head_dim", Dtype::bf16, Variant::scalar, [](AttnParams& p) { p.head_dim = 1024; }));
    table.add("a head_dim that is no multiple of 8",
              raises("head_dim", Dtype::bf16, Variant::scalar, [](AttnParams& p) { p.head_dim = 60; }));
    table.add("splits without scratch", raises("o_part", Dtype::bf16, Variant::scalar,
                                               [](AttnParams& p) { p.kv_len = p.max_kv_len = 5000; }));
#if defined(ASTRAI_NO_MMA)
    table.add("mma in a build without", raises("variant", Dtype::bf16, Variant::mma, [](AttnParams&) {}));
#else
    table.add("mma of float32", raises("dtype", Dtype::f32, Variant::mma, [](AttnParams&) {}));
    table.add("mma of unaligned q",
              raises("q", Dtype::bf16, Variant::mma, [](AttnParams& p) { p.q_stride_h = 65; }));
    table.add("mma of unaligned k",
              raises("k", Dtype::bf16, Variant::mma, [](AttnParams& p) { p.k_stride_n = 68; }));
    table.add("mma of unaligned v",
              raises("v", Dtype::bf16, Variant::mma, [](AttnParams& p) { p.v_stride_h = 4; }));
    table.add("mma of unaligned out",
              raises("out", Dtype::bf16, Variant::mma, [](AttnParams& p) { p.out_stride_b = 7; }));
#endif
}

inline void run_decode_cases(Table& table) {
    check_decode_errors(table);
    check_all_variants(table, list_shape_cases());
    check_all_variants(table, list_length_cases());
    check_all_variants(table, list_option_cases());
    check_variant<float>(table, Variant::scalar, {unaligned_case(false)});
    check_variant<bf16>(table, Variant::scalar, {unaligned_case(false)});
}

inline void run_paged_decode_cases(Table& table) {
    std::vector<DecodeCase> shapes = list_shape_cases();
    for (DecodeCase& c : shapes) {
        c.is_paged = c.has_new = true;
        c.kv_lens = {70, 9};
    }
    check_all_variants(table, shapes);
    check_all_variants(table, list_pool_cases());
    check_variant<float>(table, Variant::scalar, {unaligned_case(true)});
    check_variant<bf16>(table, Variant::scalar, {unaligned_case(true)});
    check_batch_invariance<float>(table, Variant::scalar);
    check_batch_invariance<bf16>(table, Variant::scalar);
#if !defined(ASTRAI_NO_MMA)
    check_batch_invariance<f16>(table, Variant::mma);
    check_batch_invariance<bf16>(table, Variant::mma);
#endif
}

}  // namespace test
}  // namespace astrai
