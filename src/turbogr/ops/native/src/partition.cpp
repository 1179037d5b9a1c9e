// Users of one global batch onto ranks, in integers throughout: ops/partition/reference.py gives the same answer.
//
// Users come sorted, costliest first; u, v number them in that order.
#include <algorithm>
#include <queue>
#include <utility>
#include <vector>

#include "common.h"

namespace {

const int32_t PAIRED = 10;     // users of a rank that pairs are made of
const int64_t PATIENCE = 4;    // sweeps that gain little
const int64_t OVERHEAD = 256;  // of one exchange, in combinations of gifts

struct Users {
  const int64_t *cost, *tokens;
};

struct Rank {
  int64_t load = 0, tokens = 0;
  std::vector<int32_t> users;  // ascending

  void put(const Users& all, int32_t u) {
    users.insert(std::lower_bound(users.begin(), users.end(), u), u);
    load += all.cost[u], tokens += all.tokens[u];
  }
  void take(const Users& all, int32_t u) {
    users.erase(std::lower_bound(users.begin(), users.end(), u));
    load -= all.cost[u], tokens -= all.tokens[u];
  }
};

// What one rank may give: nothing, one user or two; of those with the same cost and tokens only the first.
struct Gifts {
  std::vector<int64_t> cost, tokens;
  std::vector<std::pair<int32_t, int32_t>> users;  // -1: none
  std::vector<int32_t> kinds, twins;               // the first user of each kind; the second one or -1

  void add(int64_t c, int64_t t, int32_t u, int32_t v) {
    cost.push_back(c), tokens.push_back(t), users.push_back({u, v});
  }

  void fill(const Users& all, const Rank& rank, bool pairs, int64_t turn) {
    cost.clear(), tokens.clear(), users.clear(), kinds.clear(), twins.clear();
    for (int32_t u : rank.users) {
      bool same = !kinds.empty() && all.cost[u] == all.cost[kinds.back()] && all.tokens[u] == all.tokens[kinds.back()];
      if (!same)
        kinds.push_back(u), twins.push_back(-1);
      else if (twins.back() < 0)
        twins.back() = u;
    }
    add(0, 0, -1, -1);
    for (int32_t u : kinds) add(all.cost[u], all.tokens[u], u, -1);
    if (!pairs || kinds.empty()) return;
    size_t step = (kinds.size() + PAIRED - 1) / PAIRED, begin = size_t(turn) % step;
    for (size_t i = begin; i < kinds.size(); i += step) {
      int32_t u = kinds[i];
      if (twins[i] >= 0) add(2 * all.cost[u], 2 * all.tokens[u], u, twins[i]);
      for (size_t j = i + step; j < kinds.size(); j += step) {
        int32_t v = kinds[j];
        add(all.cost[u] + all.cost[v], all.tokens[u] + all.tokens[v], u, v);
      }
    }
  }
};

// An exchange between ranks a and b moves `aim` from a to b by halves: it leaves |gap - 2 (given - got)| of the gap.
// What it moves of the other measure must lie in [least, most].
struct Wanted {
  int64_t gap, least, most;
};

struct Found {
  int64_t gap, give = -1, get = -1;
};

INLINE int64_t absolute(int64_t x) { return x < 0 ? -x : x; }

// The first exchange of those that leave the smallest gap; give stays -1 where none is better than nothing.
// BOUND: least and most say something.
template <bool BOUND>
Found best(const std::vector<int64_t>& give, const std::vector<int64_t>& give_other, const std::vector<int64_t>& get,
           const std::vector<int64_t>& get_other, const Wanted& wanted) {
  Found found{wanted.gap};
  const int64_t width = int64_t(get.size()), *back = get.data(), *back_other = get_other.data();
  for (size_t i = 0; i < give.size(); i++) {
    int64_t rest = wanted.gap - 2 * give[i], smallest = INT64_MAX;
    int64_t low = give_other[i] - wanted.most, high = give_other[i] - wanted.least;
    for (int64_t j = 0; j < width; j++) {
      int64_t left = absolute(rest + 2 * back[j]);
      if (BOUND) left = (back_other[j] >= low) & (back_other[j] <= high) ? left : INT64_MAX;
      smallest = left < smallest ? left : smallest;
    }
    if (smallest >= found.gap) continue;
    found.gap = smallest, found.give = int64_t(i), found.get = 0;
    auto outside = [&](int64_t j) { return BOUND && (back_other[j] < low || back_other[j] > high); };
    while (absolute(rest + 2 * back[found.get]) != smallest || outside(found.get)) found.get++;
  }
  return found;
}

struct Refiner {
  Users all;
  int64_t limit, goal, work, mean;  // work: combinations of gifts that may still be looked at
  std::vector<Rank> ranks;
  Gifts high{}, low{};

  void apply(Rank& a, Rank& b, const Found& found) {
    auto give = high.users[size_t(found.give)], get = low.users[size_t(found.get)];
    for (int32_t u : {give.first, give.second})
      if (u >= 0) a.take(all, u), b.put(all, u);
    for (int32_t u : {get.first, get.second})
      if (u >= 0) b.take(all, u), a.put(all, u);
  }

  Found best_load(const Rank& a, const Rank& b) {
    work -= OVERHEAD + int64_t(high.cost.size() * low.cost.size());
    Wanted wanted{a.load - b.load, a.tokens - limit, limit - b.tokens};
    if (limit) return best<true>(high.cost, high.tokens, low.cost, low.tokens, wanted);
    return best<false>(high.cost, high.tokens, low.cost, low.tokens, wanted);
  }

  Found best_tokens(const Rank& a, const Rank& b, int64_t lightest, int64_t heaviest) {
    work -= OVERHEAD + int64_t(high.cost.size() * low.cost.size());
    Wanted wanted{a.tokens - b.tokens, std::max(a.load - heaviest, lightest - b.load),
                  std::min(a.load - lightest, heaviest - b.load)};
    return best<true>(high.tokens, high.cost, low.tokens, low.cost, wanted);
  }

  std::vector<int64_t> order(bool by_tokens) const {
    std::vector<std::pair<int64_t, int64_t>> sums;
    for (size_t r = 0; r < ranks.size(); r++) sums.push_back({by_tokens ? ranks[r].tokens : ranks[r].load, int64_t(r)});
    std::sort(sums.begin(), sums.end());
    std::vector<int64_t> sorted;
    for (auto& sum : sums) sorted.push_back(sum.second);
    return sorted;
  }

  // Sweeps over pairs of a light and a heavy rank, until PATIENCE of them in turn gain less than a sixteenth.
  void sweep_loads(bool pairs) {
    int64_t half = int64_t(ranks.size()) / 2, idle = 0, before = INT64_MAX;
    for (int64_t turn = 0;; turn++) {
      std::vector<int64_t> sorted = order(false);
      int64_t spread = ranks[size_t(sorted.back())].load - ranks[size_t(sorted[0])].load;
      idle = spread >= before - before / 16 ? idle + 1 : 0;
      if (spread <= goal || idle >= PATIENCE) return;
      before = spread;
      for (int64_t k = 0; k < half; k++) {
        Rank& a = ranks[size_t(sorted[size_t(int64_t(ranks.size()) - 1 - (k + idle) % half)])];
        Rank& b = ranks[size_t(sorted[size_t(k)])];
        if (work < 0) return;
        if (a.load <= b.load) continue;
        high.fill(all, a, pairs, turn), low.fill(all, b, pairs, turn);
        Found found = best_load(a, b);
        if (found.give >= 0) apply(a, b, found);
      }
    }
  }

  // The heaviest rank (or the lightest) with that partner that brings it nearest to the others.
  bool mend(bool heaviest, int64_t turn) {
    std::vector<int64_t> sorted = order(false);
    int64_t count = int64_t(ranks.size()), self = heaviest ? sorted.back() : sorted[0];
    int64_t partner = -1, nearest = INT64_MAX;
    // doubled, as `twice`: a quarter of what it is off
    int64_t enough = std::max(goal, absolute(ranks[size_t(self)].load - mean) / 2);
    Found chosen{0};
    (heaviest ? high : low).fill(all, ranks[size_t(self)], true, turn);
    for (int64_t k = 0; k < count - 1; k++) {
      int64_t other = heaviest ? sorted[size_t(k)] : sorted[size_t(count - 1 - k)];
      Rank &a = ranks[size_t(heaviest ? self : other)], &b = ranks[size_t(heaviest ? other : self)];
      if (a.load <= b.load || work < 0) break;
      (heaviest ? low : high).fill(all, ranks[size_t(other)], true, turn);
      Found found = best_load(a, b);
      if (found.give < 0) continue;
      int64_t sum = a.load + b.load, twice = heaviest ? sum + found.gap - 2 * mean : 2 * mean - sum + found.gap;
      if (twice >= nearest) continue;
      nearest = twice, partner = other, chosen = found;
      if (twice <= enough) break;
    }
    if (partner < 0) return false;
    (heaviest ? low : high).fill(all, ranks[size_t(partner)], true, turn);
    apply(ranks[size_t(heaviest ? self : partner)], ranks[size_t(heaviest ? partner : self)], chosen);
    return true;
  }

  void mend_extremes() {
    for (int64_t turn = 0; work >= 0; turn++) {
      std::vector<int64_t> sorted = order(false);
      if (ranks[size_t(sorted.back())].load - ranks[size_t(sorted[0])].load <= goal) return;
      bool heavy = mend(true, turn), light = mend(false, turn);
      if (!heavy && !light) return;
    }
  }

  // Tokens nearer to one another while every load stays in the range that was reached, or within `goal` of the mean.
  void sweep_tokens(int64_t enough) {
    std::vector<int64_t> loads = order(false);
    int64_t lightest = std::min(ranks[size_t(loads[0])].load, mean - goal);
    int64_t heaviest = std::max(ranks[size_t(loads.back())].load, mean + goal), half = int64_t(ranks.size()) / 2;
    for (int64_t turn = 0;; turn++) {
      std::vector<int64_t> sorted = order(true);
      bool moved = false;
      for (int64_t k = 0; k < half; k++) {
        Rank &a = ranks[size_t(sorted[ranks.size() - 1 - size_t(k)])], &b = ranks[size_t(sorted[size_t(k)])];
        if (work < 0) return;
        if (a.tokens - b.tokens <= enough) break;
        high.fill(all, a, true, turn), low.fill(all, b, true, turn);
        Found found = best_tokens(a, b, lightest, heaviest);
        if (found.give >= 0) apply(a, b, found), moved = true;
      }
      if (!moved) return;
    }
  }
};

}  // namespace

// part [n]: every user in turn to the lightest rank that has room for its tokens; -1 from the first that fits nowhere.
EXPORT void partition_largest_first(int64_t n, const int64_t* cost, const int64_t* tokens, int64_t ranks, int64_t limit,
                                    int64_t* part) {
  typedef std::pair<int64_t, int64_t> Load;
  std::priority_queue<Load, std::vector<Load>, std::greater<Load>> lightest;
  std::vector<int64_t> filled(size_t(ranks), 0);
  std::vector<Load> full;
  for (int64_t r = 0; r < ranks; r++) lightest.push({0, r});
  std::fill(part, part + n, -1);
  for (int64_t u = 0; u < n; u++) {
    while (limit && !lightest.empty() && filled[size_t(lightest.top().second)] + tokens[u] > limit)
      full.push_back(lightest.top()), lightest.pop();
    if (lightest.empty()) return;
    Load load = lightest.top();
    lightest.pop();
    part[u] = load.second;
    filled[size_t(load.second)] += tokens[u];
    lightest.push({load.first + cost[u], load.second});
    for (const Load& one : full) lightest.push(one);
    full.clear();
  }
}

// part [n], in place, until no two ranks are more than `goal` apart.
// work [2]: combinations that may be looked at for the loads, and for the tokens.
EXPORT void partition_refine(int64_t n, const int64_t* cost, const int64_t* tokens, int64_t ranks, int64_t limit,
                             int64_t goal, int64_t enough, const int64_t* work, int64_t* part) {
  Refiner refiner{{cost, tokens}, limit, goal, work[0], 0, std::vector<Rank>(size_t(ranks))};
  int64_t total = 0;
  for (int64_t u = 0; u < n; u++) {
    Rank& rank = refiner.ranks[size_t(part[u])];
    rank.users.push_back(int32_t(u)), rank.load += cost[u], rank.tokens += tokens[u], total += cost[u];
  }
  refiner.mean = total / ranks;
  refiner.sweep_loads(false);
  refiner.sweep_loads(true);
  refiner.mend_extremes();
  refiner.work = work[1];
  refiner.sweep_tokens(enough);
  for (int64_t r = 0; r < ranks; r++)
    for (int32_t u : refiner.ranks[size_t(r)].users) part[u] = r;
}
