// Runs HSTU attention, forward and backward, on a golden file and prints how far it is from what stands there.
//
// The very source that turbogr compiles, in a program of its own, so that code for another processor runs under an
// emulator. tests/native/test_attention_golden.py writes the file and says what must come out. Memory that the operator
// allocates holds NaN, so that what it reads before writing shows.
//
//   the file    arrays one after the other, each as a count (int64) and its numbers; an absent one has count 0
//   printed     NAME ERROR, a line each: |got - wanted| / |wanted|; `threads` is 0 where 1 and 2 threads give the same bits
#include <cmath>
#include <cstdio>
#include <string>

#include "hstu_attention.cpp"

// In place of the C library's.
extern "C" void* aligned_alloc(size_t alignment, size_t size) noexcept {
  void* memory = nullptr;
  if (posix_memalign(&memory, alignment, size) != 0) return nullptr;
  return std::memset(memory, 0xff, size);
}

static std::FILE* golden;

template <class E>
static std::vector<E> read() {
  int64_t count = 0;
  if (std::fread(&count, sizeof count, 1, golden) != 1) std::exit(2);
  std::vector<E> x(static_cast<size_t>(count));
  if (count && std::fread(x.data(), sizeof(E), x.size(), golden) != x.size()) std::exit(2);
  return x;
}

template <class E>
static E* address(std::vector<E>& x) {
  return x.empty() ? nullptr : x.data();
}

// A tensor [T, H, d] of fp32 or bf16 numbers; bf16 ones come and go as the fp32 numbers that they are.
struct Numbers {
  std::vector<float> single;
  std::vector<Bf16> half;

  Numbers(std::vector<float> x, bool bf16) : single(bf16 ? 0 : x.size()), half(bf16 ? x.size() : 0) {
    for (size_t n = 0; n < x.size(); n++) {
      uint32_t bits;
      std::memcpy(&bits, &x[n], sizeof bits);
      if (bf16)
        half[n] = Bf16(bits >> 16);
      else
        single[n] = x[n];
    }
  }
  // Room for `count` numbers, each of them not a number.
  Numbers(size_t count, bool bf16) : Numbers(std::vector<float>(count, NAN), bf16) {}

  Tensor tensor(int64_t heads, int64_t d) {
    return {single.empty() ? (void*)half.data() : (void*)single.data(), heads * d, d};
  }
  std::vector<float> values() const {
    std::vector<float> x = single;
    for (Bf16 number : half) {
      uint32_t bits = uint32_t(number) << 16;
      float value;
      std::memcpy(&value, &bits, sizeof value);
      x.push_back(value);
    }
    return x;
  }
};

static double error(const std::vector<float>& got, const std::vector<double>& wanted) {
  double apart = 0, size = 0;
  for (size_t n = 0; n < wanted.size(); n++) {
    apart += (got[n] - wanted[n]) * (got[n] - wanted[n]);
    size += wanted[n] * wanted[n];
  }
  return std::isfinite(apart) ? std::sqrt(size > 0 ? apart / size : apart) : INFINITY;
}

int main(int, char** arguments) {
  golden = std::fopen(arguments[1], "rb");
  if (!golden) return 2;
  std::vector<int64_t> sizes = read<int64_t>();  // bf16, H, dqk, dv, max_len, context, window, context_sees_history
  std::vector<double> width = read<double>();
  std::vector<int64_t> offsets = read<int64_t>(), targets = read<int64_t>(), times = read<int64_t>();
  std::vector<int64_t> next_times = read<int64_t>(), edges = read<int64_t>();
  std::vector<float> position = read<float>(), time = read<float>();
  const bool bf16 = sizes[0];
  const int64_t heads = sizes[1], dqk = sizes[2], dv = sizes[3], max_len = sizes[4], tokens = offsets.back();
  Numbers q(read<float>(), bf16), k(read<float>(), bf16), v(read<float>(), bf16), dy(read<float>(), bf16);
  std::vector<std::vector<double>> wanted;
  for (int n = 0; n < 6; n++) wanted.push_back(read<double>());

  std::vector<std::vector<float>> answers[2];
  for (int run = 0; run < 2; run++) {
    const size_t wide = size_t(tokens * heads * dv), narrow = size_t(tokens * heads * dqk);
    Numbers y(wide, bf16), dq(narrow, bf16), dk(narrow, bf16), dv_out(wide, bf16);
    std::vector<float> dposition(position.size(), NAN), dtime(time.size(), NAN);
    HstuCall call{};
    call.rows = int64_t(offsets.size()) - 1, call.heads = heads, call.dqk = dqk, call.dv = dv, call.max_len = max_len;
    call.offsets = offsets.data();
    call.mask = {address(targets), int32_t(sizes[5]), int32_t(sizes[6]), int32_t(sizes[7])};
    call.tables = {address(position), address(time), address(times), address(next_times), address(edges),
                   int64_t(edges.size()), width[0]};
    call.q = q.tensor(heads, dqk), call.k = k.tensor(heads, dqk), call.v = v.tensor(heads, dv);
    call.y = y.tensor(heads, dv), call.dy = dy.tensor(heads, dv);
    call.dq = dq.tensor(heads, dqk), call.dk = dk.tensor(heads, dqk), call.dv_out = dv_out.tensor(heads, dv);
    call.dposition = address(dposition), call.dtime = address(dtime);
    call.bf16 = bf16, call.threads = 1 + run;
    hstu_forward(&call);
    hstu_backward(&call);
    answers[run] = {y.values(), dq.values(), dk.values(), dv_out.values(), dposition, dtime};
  }
  const char* names[] = {"y", "dq", "dk", "dv", "dposition", "dtime"};
  bool same = true;
  for (size_t n = 0; n < 6; n++) {
    std::printf("%s %.9g\n", names[n], error(answers[0][n], wanted[n]));
    const size_t bytes = answers[0][n].size() * sizeof(float);
    same = same && (bytes == 0 || std::memcmp(answers[0][n].data(), answers[1][n].data(), bytes) == 0);
  }
  std::printf("threads %d\n", same ? 0 : 1);
  return 0;
}
