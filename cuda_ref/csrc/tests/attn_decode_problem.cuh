// One decode call: its poisoned tensors, what it has to give, and a check of all that it wrote.
#pragma once

#include <cstring>
#include <string>
#include <vector>

#include "csrc/kernels/attn_common.h"
#include "csrc/tests/test_utils.cuh"

namespace astrai {
namespace test {

struct DecodeCase {
    int head_dim = 64, value_dim = 64;
    int q_heads = 4, kv_heads = 2;
    std::vector<int> kv_lens = {65};  // contiguous: all the same
    bool is_paged = false;
    bool has_new = false;  // the last key comes as new_k, new_v; paged
    bool has_holes =
        false;  // negative slots, slots behind the pool, a short table, a request without a row; paged
    bool has_mask = false;
    bool has_sinks = false;
    bool has_lse = true;
    int window_left = WINDOW_MAX;
    float softcap = 0.0f;
    int max_kv_len = -1;  // -1 is the longest; paged
    int gap = 0;          // elements between rows

    std::string name() const {
        std::string text = "d" + std::to_string(head_dim) + "/" + std::to_string(value_dim) + " heads " +
                           std::to_string(q_heads) + "/" + std::to_string(kv_heads) + " kv";
        for (int kv_len : kv_lens) {
            text += " " + std::to_string(kv_len);
        }
        text += has_new ? " new" : "";
        text += has_holes ? " holes" : "";
        text += has_mask ? " mask" : "";
        text += has_sinks ? " sinks" : "";
        text += window_left != WINDOW_MAX ? " window " + std::to_string(window_left) : "";
        text += softcap != 0.0f ? " softcap" : "";
        text += max_kv_len >= 0 ? " max_kv_len " + std::to_string(max_kv_len) : "";
        return text + (gap != 0 ? " gap " + std::to_string(gap) : "");
    }
};

// Whether two vectors hold the same bytes, NaNs and all.
template <class T>
bool has_same_bytes(const std::vector<T>& a, const std::vector<T>& b) {
    return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

template <class T>
class DecodeProblem {
public:
    explicit DecodeProblem(const DecodeCase& c, uint32_t seed = 1)
        : case_(c), random_(seed), batch_(static_cast<int>(c.kv_lens.size())), longest_(longest(c)),
          total_(total(c)), num_slots_(c.is_paged ? total_ + SPARE_SLOTS : 0), context_(longest_),
          q_(batch_, 1, c.q_heads, c.head_dim, c.gap), k_(make_keys(c.head_dim)), v_(make_keys(c.value_dim)),
          new_k_(batch_, 1, c.kv_heads, c.head_dim, c.gap), new_v_(batch_, 1, c.kv_heads, c.value_dim, c.gap),
          out_(batch_, 1, c.q_heads, c.value_dim, c.gap) {
        // Wide enough for a few keys to outweigh the others: an average over all would hide a key too many or
        // too few.
        random_.fill(q_, 8.0f);
        random_.fill(new_k_);
        random_.fill(new_v_);
        lay_out_slots();
        for (int i = 0; i < total_; ++i) {
            mask_.push_back(static_cast<uint8_t>(random_.below(4)));
        }
        for (int head = 0; head < c.q_heads; ++head) {
            sinks_.push_back(random_.uniform());
        }
        fill_seen_keys();
    }

    // Runs the call; out and lse of it stay here.
    void run(Variant variant) {
        AttnParams params = describe();
        const int num_splits = count_decode_splits(params, DtypeOf<T>::value);
        const size_t num_parts =
            num_splits > 1 ? static_cast<size_t>(batch_) * case_.q_heads * num_splits : 0;
        DeviceBuffer<T> q(q_.elements), k(k_.elements), v(v_.elements), out(out_.elements);
        DeviceBuffer<T> new_k(new_k_.elements), new_v(new_v_.elements);
        DeviceBuffer<float> o_part(std::vector<float>(num_parts * case_.value_dim, POISON));
        DeviceBuffer<float> ml_part(std::vector<float>(num_parts * 2, POISON)), sinks(sinks_);
        DeviceBuffer<float> lse(std::vector<float>(static_cast<size_t>(batch_) * case_.q_heads, POISON));
        DeviceBuffer<int32_t> table(table_), rows(rows_), kv_indptr(kv_indptr_);
        DeviceBuffer<uint8_t> mask(mask_);
        params.q = q.data(), params.k = k.data(), params.v = v.data(), params.out = out.data();
        params.o_part = o_part.data(), params.ml_part = ml_part.data();
        params.lse = case_.has_lse ? lse.data() : nullptr;
        params.mask = case_.has_mask ? mask.data() : nullptr;
        params.sinks = case_.has_sinks ? sinks.data() : nullptr;
        CallMemory memory;
        memory.allow_read(q);
        memory.allow_write(out);
        memory.allow_write(lse);
        memory.allow_write(o_part);
        memory.allow_write(ml_part);
        memory.allow_read(mask);
        memory.allow_read(sinks);
        if (case_.has_new) {
            params.new_k = new_k.data(), params.new_v = new_v.data();
            memory.allow_read(new_k);
            memory.allow_read(new_v);
            memory.allow_write(k);
            memory.allow_write(v);
        } else {
            memory.allow_read(k);
            memory.allow_read(v);
        }
        if (case_.is_paged) {
            params.req_to_token = table.data(), params.req_pool_indices = rows.data();
            params.kv_indptr = kv_indptr.data();
            memory.allow_read(table);
            memory.allow_read(rows);
            memory.allow_read(kv_indptr);
        }
        memory.call([&] {
            (case_.is_paged ? attn_paged_decode : attn_decode)(params, DtypeOf<T>::value, variant, nullptr);
        });
        result_ = out.read();
        lse_ = lse.read();
        k_after_ = k.read();
        v_after_ = v.read();
    }

    // Runs the call and compares all that it wrote.
    void check(Table& table, Variant variant) {
        run(variant);
        Worst out_error, lse_error;
        Tensor<T> got = out_;
        got.elements = result_;
        for (int b = 0; b < batch_; ++b) {
            for (int head = 0; head < case_.q_heads; ++head) {
                const Row want = expect(b, head);
                const std::vector<float> values = got.read(b, 0, head);
                for (int d = 0; d < case_.value_dim; ++d) {
                    out_error.add(values[d], want.out[d]);
                }
                if (case_.has_lse) {
                    lse_error.add(lse_[static_cast<size_t>(b) * case_.q_heads + head], want.lse);
                }
                // What is left to compare are the gaps, which nobody may have written.
                std::memcpy(got.row(b, 0, head), out_.row(b, 0, head), case_.value_dim * sizeof(T));
            }
        }
        const std::string name = std::string(case_.is_paged ? "paged decode " : "decode ") +
                                 name_of(variant) + " " + DtypeOf<T>::name + " " + case_.name();
        table.add(name, out_error, lse_error, DtypeOf<T>::tolerance);
        if (!has_same_bytes(got.elements, out_.elements) || !has_stored_new_tokens()) {
            table.add(name + ": bytes outside", false);
        }
    }

    // Gives request 0 the q, keys and sinks of request 0 of another problem of a pool, which has as many
    // keys.
    void copy_request(const DecodeProblem& other) {
        for (int head = 0; head < case_.q_heads; ++head) {
            std::memcpy(q_.row(0, 0, head), other.q_.elements.data() + other.q_.index(0, 0, head),
                        case_.head_dim * sizeof(T));
        }
        for (int p = 0; p < case_.kv_lens[0]; ++p) {
            for (int head = 0; head < case_.kv_heads; ++head) {
                const int slot = find_slot(0, p), other_slot = other.find_slot(0, p);
                std::memcpy(k_.row(0, slot, head),
                            other.k_.elements.data() + other.k_.index(0, other_slot, head),
                            case_.head_dim * sizeof(T));
                std::memcpy(v_.row(0, slot, head),
                            other.v_.elements.data() + other.v_.index(0, other_slot, head),
                            case_.value_dim * sizeof(T));
            }
        }
        sinks_ = other.sinks_;
    }

    const std::vector<T>& result() const { return result_; }
    const std::vector<float>& lse() const { return lse_; }

    // Sizes and strides; no pointers.
    AttnParams describe() const {
        AttnParams p;
        p.batch = batch_, p.q_heads = case_.q_heads, p.kv_heads = case_.kv_heads;
        p.head_dim = case_.head_dim, p.value_dim = case_.value_dim;
        p.q_stride_b = q_.stride_b, p.q_stride_h = q_.stride_h;
        p.k_stride_b = case_.is_paged ? 0 : k_.stride_b, p.k_stride_n = k_.stride_t,
        p.k_stride_h = k_.stride_h;
        p.v_stride_b = case_.is_paged ? 0 : v_.stride_b, p.v_stride_n = v_.stride_t,
        p.v_stride_h = v_.stride_h;
        p.new_k_stride_b = new_k_.stride_b, p.new_k_stride_h = new_k_.stride_h;
        p.new_v_stride_b = new_v_.stride_b, p.new_v_stride_h = new_v_.stride_h;
        p.out_stride_b = out_.stride_b, p.out_stride_h = out_.stride_h;
        p.table_stride_r = context_, p.table_stride_n = 1;
        p.mask_stride_b = case_.is_paged ? 0 : longest_, p.mask_stride_n = 1;
        p.num_reqs = case_.is_paged ? batch_ + 1 : 0, p.context = context_, p.num_slots = num_slots_;
        p.kv_len = case_.is_paged ? 0 : longest_;
        p.max_kv_len = max_kv_len();
        p.window_left = case_.window_left;
        p.score_scale = scale();
        p.softcap = case_.softcap;
        return p;
    }

private:
    static constexpr int SPARE_SLOTS = 9;

    static int longest(const DecodeCase& c) {
        int longest = 0;
        for (int kv_len : c.kv_lens) {
            longest = std::max(longest, kv_len);
        }
        return longest;
    }
    static int total(const DecodeCase& c) {
        int total = 0;
        for (int kv_len : c.kv_lens) {
            total += kv_len;
        }
        return total;
    }
    Tensor<T> make_keys(int dim) const {
        return case_.is_paged ? Tensor<T>(1, num_slots_, case_.kv_heads, dim, case_.gap)
                              : Tensor<T>(batch_, longest_, case_.kv_heads, dim, case_.gap);
    }
    int max_kv_len() const { return case_.max_kv_len >= 0 ? case_.max_kv_len : longest_; }
    float scale() const { return 1.0f / std::sqrt(static_cast<float>(case_.head_dim)); }

    // Slots in random order. Table entries that no key has name a slot full of NaN.
    void lay_out_slots() {
        kv_indptr_ = {0};
        for (int kv_len : case_.kv_lens) {
            kv_indptr_.push_back(kv_indptr_.back() + kv_len);
        }
        if (!case_.is_paged) {
            return;
        }
        if (case_.has_holes) {
            context_ = std::max(0, longest_ - 2);
        }
        const std::vector<int> slots = random_.shuffled(num_slots_);
        table_.assign(static_cast<size_t>(batch_ + 1) * context_, slots[total_]);
        for (int b = 0; b < batch_; ++b) {
            rows_.push_back(batch_ - b);
            for (int p = 0; p < case_.kv_lens[b] && p < context_; ++p) {
                table_[static_cast<size_t>(rows_[b]) * context_ + p] = pick_slot(slots[kv_indptr_[b] + p], p);
            }
        }
        if (case_.has_holes && batch_ > 1) {
            rows_[0] = batch_ + 1;
        }
    }
    int pick_slot(int slot, int position) const {
        if (case_.has_holes && position % 5 == 3) {
            return -1 - position;
        }
        return case_.has_holes && position % 7 == 5 ? num_slots_ : slot;
    }

    // Where a key lies, in tokens of k_; -1 if nowhere.
    int find_slot(int b, int position) const {
        if (!case_.is_paged) {
            return position;
        }
        if (rows_[b] > batch_ || position >= context_) {
            return -1;
        }
        const int slot = table_[static_cast<size_t>(rows_[b]) * context_ + position];
        return slot >= 0 && slot < num_slots_ ? slot : -1;
    }
    bool is_seen(int b, int position) const {
        const size_t offset = case_.is_paged ? kv_indptr_[b] : static_cast<size_t>(b) * longest_;
        return position < max_kv_len() && (!case_.has_mask || mask_[offset + position] != 0) &&
               is_in_window(case_.kv_lens[b] - 1, position, case_.window_left, WINDOW_MAX) &&
               find_slot(b, position) >= 0;
    }
    bool is_new(int b, int position) const { return case_.has_new && position == case_.kv_lens[b] - 1; }

    void fill_seen_keys() {
        for (int b = 0; b < batch_; ++b) {
            for (int p = 0; p < case_.kv_lens[b]; ++p) {
                for (int head = 0; head < case_.kv_heads && is_seen(b, p) && !is_new(b, p); ++head) {
                    random_.fill_row(k_, case_.is_paged ? 0 : b, find_slot(b, p), head);
                    random_.fill_row(v_, case_.is_paged ? 0 : b, find_slot(b, p), head);
                }
            }
        }
    }

    Row expect(int b, int q_head) const {
        const int head = q_head / (case_.q_heads / case_.kv_heads);
        const int key_b = case_.is_paged ? 0 : b;
        std::vector<Key> keys;
        for (int p = 0; p < case_.kv_lens[b]; ++p) {
            if (is_seen(b, p)) {
                const int slot = find_slot(b, p);
                keys.push_back(is_new(b, p) ? Key{new_k_.read(b, 0, head), new_v_.read(b, 0, head)}
                                            : Key{k_.read(key_b, slot, head), v_.read(key_b, slot, head)});
            }
        }
        const ScoreRule rule{scale(), case_.softcap, case_.has_sinks ? &sinks_[q_head] : nullptr};
        return attend(q_.read(b, 0, q_head), keys, case_.value_dim, rule);
    }

    // Whether new tokens, seen or not, and nothing else, came into K and V.
    bool has_stored_new_tokens() const {
        Tensor<T> k = k_, v = v_;
        for (int b = 0; b < batch_ && case_.has_new; ++b) {
            const int slot = case_.kv_lens[b] > 0 ? find_slot(b, case_.kv_lens[b] - 1) : -1;
            for (int head = 0; head < case_.kv_heads && slot >= 0; ++head) {
                std::memcpy(k.row(0, slot, head), new_k_.elements.data() + new_k_.index(b, 0, head),
                            case_.head_dim * sizeof(T));
                std::memcpy(v.row(0, slot, head), new_v_.elements.data() + new_v_.index(b, 0, head),
                            case_.value_dim * sizeof(T));
            }
        }
        return has_same_bytes(k.elements, k_after_) && has_same_bytes(v.elements, v_after_);
    }

    DecodeCase case_;
    Random random_;
    int batch_, longest_, total_, num_slots_, context_;
    Tensor<T> q_, k_, v_, new_k_, new_v_, out_;
    std::vector<int32_t> table_, rows_, kv_indptr_;
    std::vector<uint8_t> mask_;
    std::vector<float> sinks_;
    std::vector<T> result_, k_after_, v_after_;
    std::vector<float> lse_;
};

}  // namespace test
}  // namespace astrai
