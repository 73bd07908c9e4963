// What one core does at most with the instructions of the AVX2 kernels, and what the kernels do. benchmarks/avx2_ceilings.py compiles
// and runs it: avx2_ceilings REPEATS ROWS COLS COUNT [ROWS COLS COUNT ...]. One "name value" a line; times are the least of REPEATS.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <vector>

#include "kernels_avx2.cpp"

namespace {

using namespace nsm;

constexpr int TOKENS[] = {1, 8, 32};
constexpr int LAYERS = 6, HEADS = 8, SLOTS = 128, WIDTH = 128;  // of keyed slots

int repeats;

double now() {
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

template <typename Work>
double least_seconds(int times, const Work& work) {
  double least = 1e9;
  for (int i = 0; i < times; ++i) {
    const double started = now();
    work();
    least = std::min(least, now() - started);
  }
  return least;
}

// Zeroed, on huge pages, kept to the end.
template <typename T>
T* allocate(size_t count) {
  constexpr size_t page = size_t{2} << 20;
  const size_t bytes = (count * sizeof(T) + page - 1) / page * page;
  void* memory = aligned_alloc(page, bytes);
  if (memory == nullptr) abort();
  madvise(memory, bytes, MADV_HUGEPAGE);
  return static_cast<T*>(memset(memory, 0, bytes));
}

float* random_floats(size_t count) {
  float* numbers = allocate<float>(count);
  for (size_t i = 0; i < count; ++i) numbers[i] = static_cast<float>(rand() % 2001 - 1000) * 1e-3f;
  return numbers;
}

constexpr int ROUNDS = 20000, CHAINS = 8;  // of the loops below, which take longer than reading the clock

// Cycles a second: additions that wait for each other take one each.
double measure_clock() {
  return 8 * ROUNDS / least_seconds(100, [] {
    uint64_t x = 0;
    for (int i = 0; i < ROUNDS; ++i)
      asm volatile("add $1,%0\n\tadd $1,%0\n\tadd $1,%0\n\tadd $1,%0\n\tadd $1,%0\n\tadd $1,%0\n\tadd $1,%0\n\tadd $1,%0" : "+r"(x));
  });
}

#define NSM_EIGHT(one) one(0) one(1) one(2) one(3) one(4) one(5) one(6) one(7)
#define NSM_CLOBBERS "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm11"

// Twice 32 products of int4 numbers: a multiplication and an addition each, in an order that shares the units out well.
#define NSM_INT4(i, j) \
  "vpmaddubsw %%ymm9, %%ymm10, %%ymm8\n\tvpmaddubsw %%ymm9, %%ymm10, %%ymm11\n\tvpaddw %%ymm8, %%ymm" #i ", %%ymm" #i "\n\t" \
  "vpaddw %%ymm11, %%ymm" #j ", %%ymm" #j "\n\t"
// 32 products of int8 numbers: a sign, two multiplications, an addition.
#define NSM_INT8(i) \
  "vpxor %%ymm9, %%ymm10, %%ymm8\n\tvpmaddubsw %%ymm8, %%ymm10, %%ymm8\n\tvpmaddwd %%ymm9, %%ymm8, %%ymm8\n\t" \
  "vpaddd %%ymm8, %%ymm" #i ", %%ymm" #i "\n\t"

double products_per_second(bool is_int4) {
  return 32.0 * CHAINS * ROUNDS / least_seconds(100, [&] {
    for (int i = 0; i < ROUNDS; ++i)
      if (is_int4)
        asm volatile(NSM_INT4(0, 1) NSM_INT4(2, 3) NSM_INT4(4, 5) NSM_INT4(6, 7)::: NSM_CLOBBERS);
      else
        asm volatile(NSM_EIGHT(NSM_INT8)::: NSM_CLOBBERS);
  });
}

struct Counted {
  Matrix matrix;
  int count;
};

Matrix random_matrix(int rows, int cols, bool is_int4) {
  int8_t* packed = allocate<int8_t>(static_cast<size_t>(rows + GROUP * LANES) * cols);
  const size_t numbers = static_cast<size_t>(rows) * cols, groups = static_cast<size_t>(rows) * int4_groups(cols);
  if (is_int4) {
    std::vector<uint8_t> values(numbers), steps(groups);
    for (uint8_t& value : values) value = static_cast<uint8_t>(rand() % 16);
    for (uint8_t& step : steps) step = static_cast<uint8_t>(1 + rand() % 8);
    const std::vector<int8_t> offsets(groups, -60);
    avx2_kernels()->pack4({values.data(), steps.data(), offsets.data()}, rows, cols, packed);
  } else {
    std::vector<int8_t> values(numbers);
    for (int8_t& value : values) value = static_cast<int8_t>(rand() % 255 - 127);
    avx2_kernels()->pack(values.data(), rows, cols, packed);
  }
  return {packed, random_floats(rows + LANES), rows, cols, is_int4};
}

void measure_products(const std::vector<Counted>& matrices, int cols, double hertz) {
  const char* name = matrices[0].matrix.is_int4 ? "int4" : "int8";
  int8_t* panel = allocate<int8_t>(panel_bytes(cols));
  for (int tokens : TOKENS) {
    const Quantised x{allocate<int8_t>(tokens * cols), allocate<float>(tokens), allocate<int32_t>(tokens), cols};
    const float* inputs = random_floats(static_cast<size_t>(tokens) * cols);
    for (int token = 0; token < tokens; ++token) avx2_kernels()->quantise(inputs + token * cols, cols, x, token);
    double seconds = 0, products = 0;
    for (const Counted& each : matrices) {
      const Matrix& matrix = each.matrix;
      float* y = allocate<float>(static_cast<size_t>(tokens) * matrix.rows);
      seconds += each.count * least_seconds(repeats, [&] {
        avx2_kernels()->matmul(matrix, x, tokens, 0, tiles_of(matrix.rows), y, matrix.rows, false, {nullptr, 1, 0, 0}, panel);
      });
      products += static_cast<double>(each.count) * tokens * matrix.rows * matrix.cols;
    }
    printf("%s.%d %.4g\n", name, tokens, products / seconds / hertz);
  }
}

// Reads and writes all of it once, in order.
void invert(char* memory, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 32) {
    __m256i_u* numbers = reinterpret_cast<__m256i_u*>(memory + i);
    *numbers = _mm256_xor_si256(*numbers, _mm256_set1_epi8(-1));
  }
}

// Microseconds a head of keyed slots and token: in a step of so many rows, the same head again and again, and its memory's part.
void measure_heads(int rows, bool is_half) {
  const size_t head_bytes = static_cast<size_t>(SLOTS) * WIDTH * number_bytes(is_half), heads = static_cast<size_t>(LAYERS) * rows * HEADS;
  const size_t tail = 3 * HEADS * (SLOTS + WIDTH), projected = HEADS * (SLOTS + 2 * WIDTH);
  char* states = allocate<char>(heads * head_bytes);
  float *tails = allocate<float>(LAYERS * rows * tail), *out = allocate<float>(rows * HEADS * WIDTH);
  const float *inputs = random_floats(rows * projected), *rates = random_floats(rows * 2 * HEADS);
  const float *taps = random_floats(4 * HEADS * SLOTS), *gain = random_floats(HEADS * WIDTH);
  float *scratch = allocate<float>(keyed_scratch(SLOTS, WIDTH)), *columns = allocate<float>(SLOTS * MAX_KEYED_COLUMNS);
  const KeyedLayer layer{HEADS, SLOTS, WIDTH, 4, 1e-6f, taps, taps, taps, gain, gain};
  const auto run = [&](bool is_same) {
    for (size_t number = 0; number < heads; ++number) {
      const size_t row = number / HEADS % rows, head = number % HEADS, place = is_same ? head : number;
      const size_t next = is_same ? head : std::min(number + 1, heads - 1);
      avx2_kernels()->keyed(layer, {static_cast<int>(head), 1, inputs + row * projected, rates + row * 2 * HEADS, 2 * HEADS,
                                    tails + (is_same ? 0 : number / HEADS) * tail, states + (is_same ? 0 : place) * head_bytes, is_half, scratch,
                                    columns, out + row * HEADS * WIDTH, states + (is_same ? 0 : next) * head_bytes});
    }
  };
  const char* name = is_half ? "fp16" : "fp32";
  const double each = 1e6 / static_cast<double>(heads);
  printf("%s.%d.step %.4g\n", name, rows, each * least_seconds(repeats, [&] { run(false); }));
  printf("%s.%d.cached %.4g\n", name, rows, each * least_seconds(repeats, [&] { run(true); }));
  printf("%s.%d.memory %.4g\n", name, rows, each * least_seconds(repeats, [&] { invert(states, heads * head_bytes); }));
}

}  // namespace

int main(int count, char** words) {
  repeats = atoi(words[1]);
  const double hertz = measure_clock();
  printf("clock %.4g\nint4.most %.4g\nint8.most %.4g\n", 1e-9 * hertz, products_per_second(true) / hertz, products_per_second(false) / hertz);
  for (bool is_int4 : {true, false}) {
    std::vector<Counted> matrices;
    int cols = 0;
    for (int i = 2; i + 2 < count; i += 3) {
      matrices.push_back({random_matrix(atoi(words[i]), atoi(words[i + 1]), is_int4), atoi(words[i + 2])});
      cols = std::max(cols, atoi(words[i + 1]));
    }
    measure_products(matrices, cols, hertz);
  }
  for (int rows : {8, 32})
    for (bool is_half : {false, true}) measure_heads(rows, is_half);
}
