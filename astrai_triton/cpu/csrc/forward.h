// The forward of a ragged batch: one call, one parallel region, a few phases a layer.
#pragma once

#include "model.h"

namespace astrai {

// Runs a step that has been checked. Throws std::bad_alloc when there is no memory for scratch; nothing has happened
// then.
void forward(Model& model, const AstraiStep& step);

}  // namespace astrai
