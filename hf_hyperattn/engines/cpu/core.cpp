// What Python calls (library.py).
#include "backward.h"
#include "decode.h"
#include "forward.h"
#include "norms.h"
#include "listed/backward.h"
#include "listed/choice.h"
#include "listed/decode.h"

using hyper::Bfloat;
using hyper::Call;

extern "C" {

void hyper_forward(const Call* c) { c->half ? hyper::forward<Bfloat>(*c) : hyper::forward<float>(*c); }

void hyper_decode(const Call* c, const hyper::Decode* d) {
  c->half ? hyper::decode<Bfloat>(*c, *d) : hyper::decode<float>(*c, *d);
}

void hyper_deltas(const Call* c, const float* grad, float* delta) {
  c->half ? hyper::deltas<Bfloat>(*c, grad, delta) : hyper::deltas<float>(*c, grad, delta);
}

void hyper_backward(const Call* c, const hyper::Slots* s) {
  c->half ? hyper::backward<Bfloat>(*c, *s) : hyper::backward<float>(*c, *s);
}

void hyper_norms(const hyper::NormCall* c) { c->half ? hyper::norms<Bfloat>(*c) : hyper::norms<float>(*c); }

void hyper_norms_backward(const hyper::NormCall* c) {
  c->half ? hyper::norms_backward<Bfloat>(*c) : hyper::norms_backward<float>(*c);
}

void hyper_selected_choice(const hyper::Selected* c, const hyper::Choice* s) {
  c->half ? hyper::selected_choice<Bfloat>(*c, *s) : hyper::selected_choice<float>(*c, *s);
}

void hyper_page_summaries(const hyper::Summaries* s) {
  s->half ? hyper::page_summaries<Bfloat>(*s) : hyper::page_summaries<float>(*s);
}

void hyper_selected_forward(const hyper::Selected* c) {
  c->half ? hyper::selected_forward<Bfloat>(*c) : hyper::selected_forward<float>(*c);
}

void hyper_selected_backward(const hyper::Selected* c, const hyper::SelectedGradients* s) {
  c->half ? hyper::selected_backward<Bfloat>(*c, *s) : hyper::selected_backward<float>(*c, *s);
}

// The block of keys in which a backward pass can be cut, and the width to which rows are filled.
int64_t hyper_tile_keys() { return hyper::kTileKeys; }
int64_t hyper_padded(int64_t width) { return hyper::padded(width); }
// How bfloat16 is multiplied: 0 as floats, 1 in pairs, 2 by tiles of pairs.
int hyper_bfloat16() { return hyper::has_tiles() ? 2 : hyper::paired<hyper::Operand<Bfloat>>; }
}
