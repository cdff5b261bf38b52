// What Python calls, through ctypes. Nothing throws across it.

#include "check_step.h"
#include "forward.h"
#include "kernels.h"

using astrai::Model;

extern "C" {

// Changes whenever a struct of shape.h does.
int32_t astrai_abi() { return 2; }

int64_t astrai_struct_bytes(int32_t which) {
  constexpr int64_t kBytes[] = {sizeof(AstraiShape), sizeof(AstraiLayer), sizeof(AstraiStep)};
  return kBytes[which];
}

// 0 when this process may use what the build was compiled for.
int32_t astrai_prepare() {
#if defined(__AMX_BF16__)
  return astrai::request_tiles() ? 0 : 1;
#else
  return 0;
#endif
}

// windows and ropes [n_layers], of each layer: keys a row sees, itself included, -1 is all; which table of cosines.
// Null without memory.
void* astrai_create(const AstraiShape* shape, const int64_t* windows, const int64_t* ropes) {
  try {
    return new Model(*shape, windows, ropes);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void astrai_destroy(void* model) { delete static_cast<Model*>(model); }

// 0, or 1 without memory.
int32_t astrai_pack_layer(void* model, int64_t index, const AstraiLayer* layer) {
  try {
    static_cast<Model*>(model)->pack_layer(index, *layer);
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

int32_t astrai_pack_head(void* model, const void* embed, const void* lm_head, const float* norm) {
  try {
    static_cast<Model*>(model)->pack_head(embed, lm_head, norm);
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

// The packed weights, all of them, and how many bytes they are. Models of one shape have them in the same places.
void* astrai_weights(void* model, int64_t* bytes) {
  Model& packed = *static_cast<Model*>(model);
  *bytes = packed.weight_bytes();
  return packed.weights();
}

int64_t astrai_num_bytes(const void* model) { return static_cast<const Model*>(model)->streamed_bytes(); }

// 0; 1 when the step cannot run, 2 without memory: error [size] then says why, and nothing was written.
int32_t astrai_forward(void* model, const AstraiStep* step, char* error, int64_t size) {
  Model& packed = *static_cast<Model*>(model);
  const astrai::Complaint complaint(error, size);
  if (!astrai::check_step(packed.shape, *step, complaint)) return 1;
  if (step->num_rows == 0) return 0;
  try {
    astrai::forward(packed, *step);
    return 0;
  } catch (const std::bad_alloc&) {
    complaint.say("no memory for the scratch of %lld rows", static_cast<long long>(step->num_rows));
    return 2;
  }
}
}
