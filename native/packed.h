// The shape of packed weights: panels of 32 output columns, each [words][32], one after the other. A gated weight puts 16
// gate and the 16 up columns that belong to them into one panel, so that SiLU(gate) * up needs no second pass.
#pragma once
#include "api.h"

constexpr int PANEL = 32;  // columns of a packed weight that lie side by side

// static: each instruction set keeps its own code.
static inline int64_t words_of(const mp_weight& w) { return w.type == MP_BF16 ? (w.in_features + 1) / 2 : w.in_features; }
static inline int64_t panel_outputs(const mp_weight& w) { return w.gated ? PANEL / 2 : PANEL; }  // results per panel
static inline int64_t outputs(const mp_weight& w) { return w.gated ? w.out_features / 2 : w.out_features; }
static inline int64_t panels(const mp_weight& w) { return (outputs(w) + panel_outputs(w) - 1) / panel_outputs(w); }
static inline int64_t packed_bytes(const mp_weight& w) { return panels(w) * words_of(w) * PANEL * 4; }
