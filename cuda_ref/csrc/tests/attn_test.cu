// Decode and prefill over contiguous K and V against float64, on a GPU or, with the same sources, on a CPU.
//
// From the folder cuda_ref, after mkdir -p build, with a GPU (below sm_80 also -DASTRAI_NO_MMA):
//   nvcc -std=c++17 -O3 -I . -arch=native -o build/attn_test
//       csrc/tests/attn_test.cu csrc/kernels/attn_*.cu && build/attn_test
// and without one, every access to memory checked:
//   g++ -std=c++17 -O2 -I . -DASTRAI_HOST -pthread -o build/attn_test -x c++
//       csrc/tests/attn_test.cu csrc/kernels/attn_*.cu host/*.cpp && build/attn_test
#include "csrc/tests/attn_decode_cases.cuh"
#include "csrc/tests/attn_prefill_cases.cuh"

int main() {
    astrai::test::Table table;
    astrai::test::run_decode_cases(table);
    astrai::test::run_prefill_cases(table);
    return table.finish();
}
