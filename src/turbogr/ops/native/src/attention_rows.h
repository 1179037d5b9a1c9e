// Rows of a jagged batch and who sees whom in them: [context | history | targets], as ../../hstu_attention says.
#pragma once
#include <algorithm>

#include "attention_tile.h"

struct Mask {
  const int64_t* num_targets;  // [B] or null
  int32_t context;
  int32_t window;  // INT32_MAX: none
  int32_t context_sees_history;
};

enum class Kind {
  NOTHING,   // no pair of the tile is seen
  DIAGONAL,  // history, where the query is not before the key
  WHOLE,     // history, every pair
  MIXED      // anything else, looked at cell by cell
};

struct Row {
  int64_t start;
  int length, history_end, context, window;
  bool context_sees_history;

  Row(const int64_t* offsets, const Mask& mask, int64_t b)
      : start(offsets[b]),
        length(int(offsets[b + 1] - offsets[b])),
        history_end(length - (mask.num_targets ? int(mask.num_targets[b]) : 0)),
        context(mask.context),
        window(mask.window),
        context_sees_history(mask.context_sees_history) {}

  int blocks() const { return (length + BLOCK - 1) / BLOCK; }
  int tokens_of(int block) const { return std::min(BLOCK, length - block * BLOCK); }

  // Of the tile of queries [BLOCK * query_block ..) and keys [BLOCK * key_block ..).
  Kind kind(int query_block, int key_block) const {
    int i = query_block * BLOCK, j = key_block * BLOCK;
    int i_end = i + tokens_of(query_block), j_end = j + tokens_of(key_block);
    if (i >= context && j >= context && i_end <= history_end && j_end <= history_end && i_end - 1 - j < window &&
        j <= i)
      return i == j ? Kind::DIAGONAL : Kind::WHOLE;
    return sees_any(i, i_end, j, j_end) ? Kind::MIXED : Kind::NOTHING;
  }

  VecI position(VecI place) const { return place < history_end ? place : splat(history_end); }
  VecI is_biased(VecI i, VecI j) const { return (i >= context) & (j >= context); }
  VecI sees(VecI i, VecI j) const {
    VecI ordinary = (i >= j) & ((i == j) | (j < history_end)) & (position(i) - position(j) < window);
    VecI from_context = context_sees_history ? (j < history_end) : VecI{};
    return (i < context ? from_context : ordinary) | (j < context);
  }

 private:
  // Block by block; queries and keys are cut into blocks alike, so two blocks with targets share one only on the diagonal.
  bool sees_any(int i, int i_end, int j, int j_end) const {
    if (j < context) return true;
    bool history_keys = j < history_end;
    int last_key = std::min(j_end, history_end) - 1;
    if (i < context && context_sees_history && history_keys) return true;
    int first = std::max(i, context), last = std::min(i_end, history_end) - 1;
    if (first <= last && history_keys && j <= last && first - last_key < window) return true;
    bool target_queries = i_end > history_end;
    if (target_queries && history_keys && history_end - last_key < window) return true;
    return target_queries && i == j;
  }
};
