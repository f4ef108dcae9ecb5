// How router logits become weights.
#pragma once

namespace tandem {

enum class Gating { softmax, sigmoid };

}  // namespace tandem
