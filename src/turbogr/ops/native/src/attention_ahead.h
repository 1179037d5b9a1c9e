// The rows that a thread works on next, brought into its cache while it works on these: a short row is over before the
// processor has seen how its tokens lie, which are parts of a wider buffer.
#pragma once
#include <vector>

#include "common.h"

class Ahead {
 public:
  // From now on the tokens of rows *first .. *last are fetched. Answers itself, or null where there are none.
  Ahead* start(const int64_t* of_rows, const int64_t* first, const int64_t* last) {
    offsets = of_rows, row = first, end_row = last, token = end = 0;
    parts.clear();
    return first == last ? nullptr : this;
  }
  // Of a token, `bytes` from its place in `data` on, tokens being `stride` bytes apart.
  void add(const void* data, int64_t stride, int64_t bytes) { parts.push_back({(const char*)data, stride, bytes}); }

  // The next few tokens, unless null: so little at a time that no product waits for it.
  INLINE void fetch(Ahead* ahead, int tokens) {
    if (ahead) ahead->fetch(tokens);
  }

 private:
  __attribute__((noinline)) void fetch(int tokens) {
    for (; tokens > 0; tokens--, token++) {
      while (token == end) {
        if (row == end_row) return;
        token = offsets[*row], end = offsets[*row + 1], row++;
      }
      for (const Part& part : parts)
        for (int64_t b = 0; b < part.bytes; b += 64) __builtin_prefetch(part.data + token * part.stride + b, 0, 2);
    }
  }

  struct Part {
    const char* data;
    int64_t stride, bytes;
  };
  std::vector<Part> parts;
  const int64_t *offsets = nullptr, *row = nullptr, *end_row = nullptr;
  int64_t token = 0, end = 0;  // of the row at hand
};
