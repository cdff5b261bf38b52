// Which kernels this build has, by the instruction set it is compiled for.
#pragma once

#include "attend_row.h"
#include "attend_row_amx.h"
#include "attend_rows_amx.h"
#include "block.h"
#include "block_amx.h"
#include "block_quant.h"

namespace astrai {

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
using Bf16Kernel = AmxKernel;
constexpr bool kHasAmx = true;
#elif defined(__AVX512BF16__)
using Bf16Kernel = DotKernel;
constexpr bool kHasAmx = false;
#else
using Bf16Kernel = WidenKernel;
constexpr bool kHasAmx = false;
#endif

}  // namespace astrai
