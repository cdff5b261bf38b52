// The Python module: argument structs with fields by name, pointers as integers, and the entry points.
//
// Free of torch, so that it compiles in seconds. Types and exceptions are local to the module: several builds
// of these sources live in one process.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <initializer_list>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "csrc/kernels/attn_common.h"
#include "csrc/kernels/rotary_common.h"
#if defined(ASTRAI_HOST)
#include "host/errors.h"
#include "host/global_memory.h"
#endif

namespace py = pybind11;

namespace astrai {
namespace {

// Address, bytes and whether kernels may write there, of every tensor of a call.
using Ranges = std::vector<std::tuple<uintptr_t, size_t, bool>>;

#if defined(ASTRAI_HOST)
std::vector<host::MemoryRange> to_memory_ranges(const Ranges& ranges) {
    std::vector<host::MemoryRange> result;
    result.reserve(ranges.size());
    for (const auto& [address, num_bytes, is_writable] : ranges) {
        result.push_back({address, num_bytes, is_writable});
    }
    return result;
}
#endif

template <class Owner, class Field>
void bind_field(py::class_<Owner>& owner, const char* name, Field Owner::*field) {
    if constexpr (std::is_pointer_v<Field>) {
        owner.def_property(
            name, [field](const Owner& self) { return reinterpret_cast<uintptr_t>(self.*field); },
            [field](Owner& self, uintptr_t address) { self.*field = reinterpret_cast<Field>(address); });
    } else {
        owner.def_readwrite(name, field);
    }
}

#define ASTRAI_FIELD(NAME) bind_field(owner, #NAME, &Owner::NAME)

void bind_attn_params(py::module_& module) {
    using Owner = AttnParams;
    py::class_<Owner> owner(module, "AttnParams", py::module_local());
    owner.def(py::init<>());
    ASTRAI_FIELD(q);
    ASTRAI_FIELD(k);
    ASTRAI_FIELD(v);
    ASTRAI_FIELD(new_k);
    ASTRAI_FIELD(new_v);
    ASTRAI_FIELD(out);
    ASTRAI_FIELD(lse);
    ASTRAI_FIELD(o_part);
    ASTRAI_FIELD(ml_part);
    ASTRAI_FIELD(req_to_token);
    ASTRAI_FIELD(req_pool_indices);
    ASTRAI_FIELD(kv_indptr);
    ASTRAI_FIELD(qo_indptr);
    ASTRAI_FIELD(q_tile_to_batch);
    ASTRAI_FIELD(q_tile_to_index);
    ASTRAI_FIELD(mask);
    ASTRAI_FIELD(mask_indptr);
    ASTRAI_FIELD(sinks);
    ASTRAI_FIELD(q_stride_b);
    ASTRAI_FIELD(q_stride_t);
    ASTRAI_FIELD(q_stride_h);
    ASTRAI_FIELD(k_stride_b);
    ASTRAI_FIELD(k_stride_n);
    ASTRAI_FIELD(k_stride_h);
    ASTRAI_FIELD(v_stride_b);
    ASTRAI_FIELD(v_stride_n);
    ASTRAI_FIELD(v_stride_h);
    ASTRAI_FIELD(new_k_stride_b);
    ASTRAI_FIELD(new_k_stride_h);
    ASTRAI_FIELD(new_v_stride_b);
    ASTRAI_FIELD(new_v_stride_h);
    ASTRAI_FIELD(out_stride_b);
    ASTRAI_FIELD(out_stride_t);
    ASTRAI_FIELD(out_stride_h);
    ASTRAI_FIELD(table_stride_r);
    ASTRAI_FIELD(table_stride_n);
    ASTRAI_FIELD(mask_stride_b);
    ASTRAI_FIELD(mask_stride_t);
    ASTRAI_FIELD(mask_stride_n);
    ASTRAI_FIELD(batch);
    ASTRAI_FIELD(q_heads);
    ASTRAI_FIELD(kv_heads);
    ASTRAI_FIELD(head_dim);
    ASTRAI_FIELD(value_dim);
    ASTRAI_FIELD(q_len);
    ASTRAI_FIELD(kv_len);
    ASTRAI_FIELD(num_reqs);
    ASTRAI_FIELD(context);
    ASTRAI_FIELD(num_slots);
    ASTRAI_FIELD(num_q_tiles);
    ASTRAI_FIELD(max_kv_len);
    ASTRAI_FIELD(window_left);
    ASTRAI_FIELD(window_right);
    ASTRAI_FIELD(score_scale);
    ASTRAI_FIELD(softcap);
}

void bind_rotary_params(py::module_& module) {
    using Owner = RotaryParams;
    py::class_<Owner> owner(module, "RotaryParams", py::module_local());
    owner.def(py::init<>());
    ASTRAI_FIELD(q);
    ASTRAI_FIELD(k);
    ASTRAI_FIELD(v);
    ASTRAI_FIELD(freqs);
    ASTRAI_FIELD(q_out);
    ASTRAI_FIELD(k_out);
    ASTRAI_FIELD(k_pool);
    ASTRAI_FIELD(v_pool);
    ASTRAI_FIELD(out_cache_loc);
    ASTRAI_FIELD(q_stride_b);
    ASTRAI_FIELD(q_stride_t);
    ASTRAI_FIELD(q_stride_h);
    ASTRAI_FIELD(k_stride_b);
    ASTRAI_FIELD(k_stride_t);
    ASTRAI_FIELD(k_stride_h);
    ASTRAI_FIELD(v_stride_t);
    ASTRAI_FIELD(v_stride_h);
    ASTRAI_FIELD(freqs_stride_b);
    ASTRAI_FIELD(freqs_stride_t);
    ASTRAI_FIELD(q_out_stride_b);
    ASTRAI_FIELD(q_out_stride_t);
    ASTRAI_FIELD(q_out_stride_h);
    ASTRAI_FIELD(k_out_stride_b);
    ASTRAI_FIELD(k_out_stride_t);
    ASTRAI_FIELD(k_out_stride_h);
    ASTRAI_FIELD(k_pool_stride_n);
    ASTRAI_FIELD(k_pool_stride_h);
    ASTRAI_FIELD(v_pool_stride_n);
    ASTRAI_FIELD(v_pool_stride_h);
    ASTRAI_FIELD(loc_stride);
    ASTRAI_FIELD(num_slots);
    ASTRAI_FIELD(num_b);
    ASTRAI_FIELD(num_t);
    ASTRAI_FIELD(q_heads);
    ASTRAI_FIELD(kv_heads);
    ASTRAI_FIELD(head_dim);
    ASTRAI_FIELD(value_dim);
    ASTRAI_FIELD(rotary_dim);
}

void bind_merge_params(py::module_& module) {
    using Owner = MergeParams;
    py::class_<Owner> owner(module, "MergeParams", py::module_local());
    owner.def(py::init<>());
    ASTRAI_FIELD(o_a);
    ASTRAI_FIELD(lse_a);
    ASTRAI_FIELD(o_b);
    ASTRAI_FIELD(lse_b);
    ASTRAI_FIELD(out);
    ASTRAI_FIELD(lse);
    ASTRAI_FIELD(o_a_stride_t);
    ASTRAI_FIELD(o_a_stride_h);
    ASTRAI_FIELD(lse_a_stride_t);
    ASTRAI_FIELD(lse_a_stride_h);
    ASTRAI_FIELD(o_b_stride_t);
    ASTRAI_FIELD(o_b_stride_h);
    ASTRAI_FIELD(lse_b_stride_t);
    ASTRAI_FIELD(lse_b_stride_h);
    ASTRAI_FIELD(out_stride_t);
    ASTRAI_FIELD(out_stride_h);
    ASTRAI_FIELD(tokens);
    ASTRAI_FIELD(heads);
    ASTRAI_FIELD(head_dim);
}

#undef ASTRAI_FIELD

template <class Enum>
void bind_numbers(py::module_& module, const char* name,
                  std::initializer_list<std::pair<const char*, Enum>> members) {
    py::object numbers = py::module_::import("types").attr("SimpleNamespace")();
    for (const auto& [member, value] : members) {
        numbers.attr(member) = static_cast<int>(value);
    }
    module.attr(name) = numbers;
}

// An entry point as Python calls it: (params, dtype, variant or the like, stream, ranges), the GIL released.
template <class Params, class Kind>
void bind_entry(py::module_& module, const char* name, void (*entry)(const Params&, Dtype, Kind, void*)) {
    module.def(
        name,
        [entry](const Params& params, int dtype, int kind, uintptr_t stream, const Ranges& ranges) {
#if defined(ASTRAI_HOST)
            const host::MemoryScope scope(to_memory_ranges(ranges));
#else
            static_cast<void>(ranges);
#endif
            entry(params, static_cast<Dtype>(dtype), static_cast<Kind>(kind),
                  reinterpret_cast<void*>(stream));
        },
        py::call_guard<py::gil_scoped_release>());
}

}  // namespace
}  // namespace astrai

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
    using namespace astrai;
    // Plain numbers under their names: py::enum_ takes as long to compile as all the rest.
    bind_numbers<Dtype>(module, "Dtype", {{"f32", Dtype::f32}, {"f16", Dtype::f16}, {"bf16", Dtype::bf16}});
    bind_numbers<Variant>(module, "Variant", {{"scalar", Variant::scalar}, {"mma", Variant::mma}});
    bind_numbers<Pairing>(module, "Pairing", {{"adjacent", Pairing::adjacent}, {"half", Pairing::half}});
    bind_attn_params(module);
    bind_rotary_params(module);
    bind_merge_params(module);
    module.def("count_decode_splits", [](const AttnParams& params, int dtype) {
        return count_decode_splits(params, static_cast<Dtype>(dtype));
    });
    bind_entry(module, "attn_decode", &attn_decode);
    bind_entry(module, "attn_prefill", &attn_prefill);
    bind_entry(module, "attn_paged_decode", &attn_paged_decode);
    bind_entry(module, "attn_paged_prefill", &attn_paged_prefill);
    bind_entry(module, "rotary_emb", &rotary_emb);
    bind_entry(module, "merge_states", &merge_states);
#if defined(ASTRAI_HOST)
    module.attr("is_host") = true;
    py::register_local_exception<host::CheckError>(module, "CheckError", PyExc_RuntimeError);
#else
    module.attr("is_host") = false;
#endif
#if defined(ASTRAI_NO_MMA)
    module.attr("has_mma") = false;
#else
    module.attr("has_mma") = true;
#endif
}
