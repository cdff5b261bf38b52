// Decode and prefill over K and V in a pool against float64, on a GPU or, with the same sources, on a CPU.
//
// From the folder cuda_ref, after mkdir -p build, with a GPU (below sm_80 also -DASTRAI_NO_MMA):
//   nvcc -std=c++17 -O3 -I . -arch=native -o build/attn_paged_test
//       csrc/tests/attn_paged_test.cu csrc/kernels/attn_*.cu && build/attn_paged_test
// and without one, every access to memory checked:
//   g++ -std=c++17 -O2 -I . -DASTRAI_HOST -pthread -o build/attn_paged_test -x c++
//       csrc/tests/attn_paged_test.cu csrc/kernels/attn_*.cu host/*.cpp && build/attn_paged_test
#include "csrc/tests/attn_decode_cases.cuh"
#include "csrc/tests/attn_prefill_cases.cuh"

int main() {
    astrai::test::Table table;
    astrai::test::run_paged_decode_cases(table);
    astrai::test::run_paged_prefill_cases(table);
    return table.finish();
}
