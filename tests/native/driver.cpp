// Calls every kernel of every instruction set on heap buffers of exactly the size that it may touch, and compares with
// plain loops in double. The kernels are built with sanitizers, so that one byte that they read or write beside a buffer
// ends it. Usage: driver [instruction set]…, all without.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels.h"

using namespace draftsmith;

namespace {

int failures = 0;

void failed(const char* table, const std::string& what) {
  ++failures;
  std::printf("%s: %s\n", table, what.c_str());
}

// A macro, so that what is said of a failure is put together only where there is one.
#define EXPECT(ok, table, what) \
  do {                          \
    if (!(ok)) failed(table, what); \
  } while (false)

// A buffer of exactly `count` values: std::vector may own more.
template <class T>
struct Exact {
  std::unique_ptr<T[]> memory;
  int64_t count;
  explicit Exact(int64_t n) : memory(new T[n]), count(n) {}
  T* data() { return memory.get(); }
  T& operator[](int64_t i) { return memory[i]; }
};

std::mt19937 generator(1);
float drawn() { return std::normal_distribution<float>()(generator); }
int64_t below(int64_t n) { return std::uniform_int_distribution<int64_t>(0, n - 1)(generator); }

std::string sizes(std::initializer_list<int64_t> values) {
  std::string text;
  for (const int64_t value : values) text += " " + std::to_string(value);
  return text;
}

void products(const Kernels& k, int64_t rows, int64_t pairs, int64_t panels, int64_t gap) {
  const int64_t x_stride = 2 * pairs + gap, y_stride = panels * kPanel + gap;
  Exact<bf16> x(rows ? (rows - 1) * x_stride + 2 * pairs : 0), w(panels * pairs * 2 * kPanel);
  Exact<float> y(rows ? (rows - 1) * y_stride + panels * kPanel : 0), one(panels * kPanel);
  for (int64_t i = 0; i < x.count; ++i) x[i] = narrow(drawn());
  for (int64_t i = 0; i < w.count; ++i) w[i] = narrow(drawn());
  for (int64_t i = 0; i < y.count; ++i) y[i] = 77.0f;
  // What is asked for ahead may lie anywhere, and changes nothing.
  k.gemm(x.data(), x_stride, rows, w.data(), pairs, panels, w.data() + w.count, y.data(), y_stride);
  for (int64_t r = 0; r < rows; ++r) {
    // The row alone, in a buffer of its own, has the same bits.
    Exact<bf16> alone(2 * pairs);
    for (int64_t i = 0; i < 2 * pairs; ++i) alone[i] = x[r * x_stride + i];
    k.gemm(alone.data(), 2 * pairs, 1, w.data(), pairs, panels, nullptr, one.data(), panels * kPanel);
    for (int64_t n = 0; n < panels * kPanel; ++n) {
      double sum = 0, size = 0;
      for (int64_t i = 0; i < 2 * pairs; ++i) {
        const double product = static_cast<double>(widen(alone[i])) *
                               widen(w[((n / kPanel * pairs + i / 2) * kPanel + n % kPanel) * 2 + i % 2]);
        sum += product, size += std::abs(product);
      }
      const float found = y[r * y_stride + n];
      EXPECT(std::abs(found - sum) <= static_cast<double>(2 * pairs) * 0x1p-23 * size, k.name,
             "gemm" + sizes({rows, pairs, panels, r, n}));
      EXPECT(found == one[n], k.name, "gemm alone" + sizes({rows, pairs, panels, r, n}));
    }
    for (int64_t i = 0; i < gap && r + 1 < rows; ++i)
      EXPECT(y[r * y_stride + panels * kPanel + i] == 77.0f, k.name, "gemm writes beside its rows");
  }
}

void whole_products(const Kernels& k, int64_t rows, int64_t quads, int64_t panels) {
  const int64_t x_stride = 4 * quads, y_stride = panels * kPanel;
  Exact<int8_t> x(rows * x_stride), w(panels * quads * 4 * kPanel);
  Exact<int32_t> y(rows * y_stride), sums(panels * kPanel);
  for (int64_t i = 0; i < x.count; ++i) x[i] = static_cast<int8_t>(below(255) - 127);
  for (int64_t i = 0; i < w.count; ++i) w[i] = static_cast<int8_t>(below(255) - 127);
  const auto weight = [&](int64_t n, int64_t i) {
    return static_cast<int32_t>(w[((n / kPanel * quads + i / 4) * kPanel + n % kPanel) * 4 + i % 4]);
  };
  for (int64_t n = 0; n < panels * kPanel; ++n) {
    sums[n] = 0;
    for (int64_t i = 0; i < 4 * quads; ++i) sums[n] += weight(n, i);
  }
  k.gemm_int8(x.data(), x_stride, rows, w.data(), sums.data(), quads, panels, rows % 2 ? w.data() : nullptr, y.data(),
              y_stride);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t n = 0; n < panels * kPanel; ++n) {
      int32_t sum = 0;
      for (int64_t i = 0; i < 4 * quads; ++i) sum += x[r * x_stride + i] * weight(n, i);
      EXPECT(sum == y[r * y_stride + n], k.name, "gemm_int8" + sizes({rows, quads, panels, r, n}));
    }
}

// Products in 4 bits, the rows and a panel's weights made by the kernels too.
void grouped_products(const Kernels& k, int64_t rows, int64_t inputs, int64_t panels) {
  const int64_t groups = (inputs + kGroup - 1) / kGroup, y_stride = panels * kPanel;
  Exact<int8_t> values(rows * groups * kGroup);
  Exact<float> scales(rows * groups), y(rows * y_stride);
  Exact<int32_t> minus(rows * groups);
  Exact<bf16> x(inputs);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < inputs; ++i) x[i] = narrow(drawn());
    k.quantise_groups(x.data(), inputs, values.data() + r * groups * kGroup, scales.data() + r * groups,
                      minus.data() + r * groups);
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t at = r * groups + g, some = std::min(kGroup, inputs - g * kGroup);
      int32_t sum = 0;
      for (int64_t i = 0; i < kGroup; ++i) {
        const int32_t whole = values[at * kGroup + i];
        sum += whole;
        const double right = i < some ? static_cast<double>(widen(x[g * kGroup + i])) : 0;
        EXPECT(std::abs(static_cast<double>(scales[at]) * whole - right) <= 0.5001 * static_cast<double>(scales[at]),
               k.name, "quantise_groups" + sizes({inputs, g, i}));
      }
      EXPECT(-sum == minus[at], k.name, "quantise_groups, sum" + sizes({inputs, g}));
    }
  }
  const Int4Panel panel{groups};
  Exact<uint8_t> w(panels * panel.bytes());
  for (int64_t i = 0; i < w.count; ++i) w[i] = static_cast<uint8_t>(below(256));
  std::vector<int64_t> whole(panels * kPanel * groups * kGroup);
  std::vector<float> steps(panels * kPanel * groups), units(panels * kPanel);
  for (int64_t n = 0; n < panels * kPanel; ++n) {
    units[n] = 20.0f / (15 * 8 * 255) * static_cast<float>(1 + n % 2);
    std::copy_n(reinterpret_cast<const uint8_t*>(&units[n]), 4,
                w.data() + n / kPanel * panel.bytes() + panel.units() + n % kPanel * 4);
    for (int64_t g = 0; g < groups; ++g) {
      Exact<float> weights(kGroup);
      Exact<uint8_t> levels(kGroup);
      float least = 1e30f, most = -1e30f;
      for (int64_t i = 0; i < kGroup; ++i) {
        weights[i] = drawn() + static_cast<float>(n % 3);
        least = std::min(least, weights[i]), most = std::max(most, weights[i]);
      }
      uint8_t scale, zero;
      k.round_group(weights.data(), units[n], levels.data(), &scale, &zero);
      const double unit = static_cast<double>(units[n]), from = std::min(0.0, static_cast<double>(least));
      const double range = std::max(static_cast<double>(most), from / 2) - from;
      uint8_t* lines = w.data() + n / kPanel * panel.bytes() + panel.levels(g);
      for (int64_t i = 0; i < kGroup; ++i) {
        const int64_t at = n * groups + g;
        whole[at * kGroup + i] = 8 * levels[i] - zero, steps[at] = scale;
        EXPECT(levels[i] < 16 && std::abs(static_cast<double>(whole[at * kGroup + i]) * scale * unit -
                                          static_cast<double>(weights[i])) <= range / 15 * 2 + 8 * unit,
               k.name, "round_group" + sizes({n, g, i}));
        uint8_t& both = lines[i / 8 * 64 + n % kPanel * 4 + i % 4];
        both = static_cast<uint8_t>(i % 8 < 4 ? (both & 0xf0) | levels[i] : (both & 0x0f) | levels[i] << 4);
      }
      uint8_t* details = w.data() + n / kPanel * panel.bytes() + panel.details(g) + n % kPanel * 4 + g % 2;
      details[0] = zero, details[2] = scale;
    }
  }
  // By factors that hand nothing on, what comes out is as near, and nothing behind the group is changed.
  const int64_t count = groups * kGroup;
  Exact<float> left(count * kPanel), factors(count * count), room(kPanel);
  for (int64_t i = 0; i < left.count; ++i) left[i] = drawn();
  for (int64_t i = 0; i < count; ++i)
    for (int64_t j = 0; j < count; ++j) factors[i * count + j] = i == j ? 0.5f : 0;
  for (int64_t n = 0; n < kPanel; ++n) room[n] = 20.0f / (15 * 8 * 255);
  const std::vector<float> before(left.data(), left.data() + left.count);
  Exact<uint8_t> rounded(kGroup * kPanel), by(kPanel), from(kPanel);
  k.round_panel(left.data(), count, factors.data(), count, room.data(), rounded.data(), by.data(), from.data());
  for (int64_t i = 0; i < kGroup * kPanel; ++i) {
    const int64_t n = i % kPanel;
    float least = 0, most = 0;
    for (int64_t j = n; j < kGroup * kPanel; j += kPanel) least = std::min(least, before[j]), most = std::max(most, before[j]);
    EXPECT(std::abs(static_cast<float>(8 * rounded[i] - from[n]) * static_cast<float>(by[n]) * room[n] - before[i]) <=
               (std::max(most, -least / 2) - least) / 15 * 2 + 8 * room[n], k.name, "round_panel" + sizes({inputs, i}));
  }
  for (int64_t i = 0; i < left.count; ++i) EXPECT(left[i] == before[i], k.name, "round_panel, behind" + sizes({inputs, i}));
  k.gemm_int4({values.data(), scales.data(), minus.data()}, rows, w.data(), groups, panels,
              rows % 2 ? w.data() : nullptr, y.data(), y_stride);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t n = 0; n < panels * kPanel; ++n) {
      float total = 0;
      for (int64_t g = 0; g < groups; ++g) {
        int64_t exact = 0;
        for (int64_t i = 0; i < kGroup; ++i)
          exact += whole[(n * groups + g) * kGroup + i] * values[(r * groups + g) * kGroup + i];
        const float scale = steps[n * groups + g] * scales[r * groups + g];
        const float part = static_cast<float>(exact) * scale;
        total += part;
      }
      EXPECT(total * units[n] == y[r * y_stride + n], k.name, "gemm_int4" + sizes({rows, inputs, panels, r, n}));
    }
}

// Sums of groups at their largest: inputs of ±127, levels of 15 or 0, zero points and scales of 255.
void largest_products(const Kernels& k, int64_t rows, int64_t groups, int64_t panels) {
  Exact<int8_t> values(rows * groups * kGroup);
  Exact<float> scales(rows * groups), y(rows * panels * kPanel);
  Exact<int32_t> minus(rows * groups);
  Exact<bf16> x(groups * kGroup);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < x.count; ++i) x[i] = narrow(r % 2 ? -127.0f : 127.0f);
    k.quantise_groups(x.data(), x.count, values.data() + r * x.count, scales.data() + r * groups, minus.data() + r * groups);
  }
  const Int4Panel panel{groups};
  Exact<uint8_t> w(panels * panel.bytes());
  for (int64_t i = 0; i < w.count; ++i) w[i] = i / 4 % 2 ? 255 : 0;  // levels, by turns of the outputs
  const float unit = 1;
  for (int64_t p = 0; p < panels; ++p) {
    for (int64_t g = 0; g < groups; ++g) std::fill_n(w.data() + p * panel.bytes() + panel.details(g), 64, 255);
    for (int64_t n = 0; n < kPanel; ++n)
      std::copy_n(reinterpret_cast<const uint8_t*>(&unit), sizeof unit, w.data() + p * panel.bytes() + panel.units() + 4 * n);
  }
  k.gemm_int4({values.data(), scales.data(), minus.data()}, rows, w.data(), groups, panels, nullptr, y.data(), panels * kPanel);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t n = 0; n < panels * kPanel; ++n) {
      const int64_t one = (n % 2 ? 8 * 15 - 255 : -255) * (r % 2 ? -127 : 127) * kGroup * 255;
      EXPECT(static_cast<float>(one * groups) == y[r * panels * kPanel + n], k.name,
             "gemm_int4, largest" + sizes({rows, groups, panels, r, n}));
    }
}

// Some nodes behind `committed` entries. Their paths fork at random, or are one chain that the nodes lie along; every
// node sees at most `window` places. Entries that a node does not see hold NaN for all but the nodes that do.
void attention(const Kernels& k, int64_t nodes, int64_t groups, int64_t width, int64_t value_width, int64_t committed,
               int64_t window, bool chain, bool broken, bool early = false, bool keys_alone = false) {
  const int64_t heads = 2, entries = committed + nodes, key_stride = heads * width, value_stride = heads * value_width;
  const int64_t query_stride = groups * width + 3;
  // The last head of the last entry ends the buffer, so its rows cannot be overrun unnoticed.
  Exact<bf16> keys(entries * key_stride), values(entries * value_stride);
  Exact<bf16> queries((nodes - 1) * query_stride + groups * width);
  Exact<float> out(nodes * groups * value_width), one(groups * value_width);
  for (int64_t i = 0; i < keys.count; ++i) keys[i] = narrow(drawn());
  for (int64_t i = 0; i < values.count; ++i) values[i] = narrow(drawn());
  for (int64_t i = 0; i < queries.count; ++i) queries[i] = narrow(drawn());
  // One channel of an entry is no number: of the last one, which only the last node sees, or of the first. In half of the
  // cases its keys are none either, so that nothing of who sees it is one; or they alone are none.
  const bool nothing = broken && (keys_alone || nodes % 2 == 0);
  const int64_t fault = early ? 0 : entries - 1;
  if (broken && !keys_alone)
    values[fault * value_stride + (heads - 1) * value_width] = nodes % 3 == 0 ? 0x7fc0 : 0xff80;
  if (nothing)
    for (int64_t i = 0; i < key_stride; ++i) keys[fault * key_stride + i] = 0x7fc0;
  Exact<int64_t> first(nodes), last(nodes);
  Exact<int32_t> paths(nodes * nodes);
  std::vector<std::vector<int64_t>> seen(nodes);  // entries behind the committed ones
  for (int64_t n = 0; n < nodes; ++n) {
    const int64_t parent = chain ? n - 1 : below(n + 1) - 1;
    if (parent >= 0) seen[n] = seen[parent];
    seen[n].push_back(committed + n);
    for (size_t i = 0; i < seen[n].size(); ++i) paths[n * nodes + static_cast<int64_t>(i)] = static_cast<int32_t>(seen[n][i]);
    last[n] = committed + static_cast<int64_t>(seen[n].size());
    first[n] = std::max<int64_t>(0, last[n] - window);
  }
  AttentionTask task{};
  task.queries = queries.data(), task.query_stride = query_stride, task.scale = 0.75f;
  task.nodes = nodes, task.groups = groups, task.width = width, task.value_width = value_width;
  task.keys = keys.data() + (heads - 1) * width, task.values = values.data() + (heads - 1) * value_width;
  task.key_stride = key_stride, task.value_stride = value_stride;
  task.shared = chain ? committed + 1 : committed, task.entries = entries;
  task.first = first.data(), task.last = last.data();
  task.paths = chain ? nullptr : paths.data(), task.path_stride = nodes;
  Exact<float> scratch(k.attention_room(nodes * groups, entries, width, value_width));
  task.scratch = scratch.data(), task.out = out.data();
  for (int64_t i = 0; i < scratch.count; ++i) scratch[i] = std::numeric_limits<float>::quiet_NaN();
  k.attend(task);
  const std::string what = sizes({nodes, groups, width, value_width, committed, window, chain, broken});
  for (int64_t n = 0; n < nodes; ++n) {
    const bool sees_it = broken && (early ? first[n] == 0 : n == nodes - 1);
    // The node by itself has the same bits, its entries one behind the other as in a text.
    const int64_t count = last[n];
    Exact<bf16> own_keys(count * key_stride), own_values(count * value_stride);
    for (int64_t p = 0; p < count; ++p) {
      const int64_t e = p < committed ? p : seen[n][static_cast<size_t>(p - committed)];
      std::copy_n(keys.data() + e * key_stride, key_stride, own_keys.data() + p * key_stride);
      std::copy_n(values.data() + e * value_stride, value_stride, own_values.data() + p * value_stride);
    }
    AttentionTask alone = task;
    alone.queries = queries.data() + n * query_stride, alone.nodes = 1, alone.paths = nullptr;
    alone.keys = own_keys.data() + (heads - 1) * width, alone.values = own_values.data() + (heads - 1) * value_width;
    alone.shared = alone.entries = count, alone.first = first.data() + n, alone.last = last.data() + n;
    Exact<float> room(k.attention_room(groups, count, width, value_width));
    alone.scratch = room.data(), alone.out = one.data();
    k.attend(alone);
    for (int64_t g = 0; g < groups; ++g) {
      std::vector<double> p;
      double highest = -std::numeric_limits<double>::infinity(), total = 0;
      for (int64_t e = first[n]; e < count; ++e) {
        double score = 0;
        for (int64_t d = 0; d < width; ++d)
          score += 0.75 * widen(alone.queries[g * width + d]) * widen(alone.keys[e * key_stride + d]);
        p.push_back(score), highest = std::max(highest, score);
      }
      for (double& value : p) total += value = std::exp(value - highest);
      for (int64_t d = 0; d < value_width; ++d) {
        const float found = out[(n * groups + g) * value_width + d];
        const float alone_found = one[g * value_width + d];
        EXPECT(found == alone_found || (std::isnan(found) && std::isnan(alone_found)), k.name,
               "attend alone" + what + " at" + sizes({n, g, d}));
        if (sees_it && (nothing || d == 0)) {
          EXPECT(!std::isfinite(found), k.name, "attend, not finite" + what);
          continue;
        }
        double sum = 0, size = 0;
        for (int64_t e = first[n]; e < count; ++e) {
          const double part = p[static_cast<size_t>(e - first[n])] / total * widen(alone.values[e * value_stride + d]);
          sum += part, size += std::abs(part);
        }
        // Scores of this size are off by some 1e-5, and so are their exponentials.
        EXPECT(std::abs(found - sum) <= 1e-4 * size, k.name, "attend" + what + " at" + sizes({n, g, d}));
      }
    }
  }
  // In blocks that lie anywhere, among others of which nothing is a number, the bits are the same.
  const int64_t used = (entries + kBlockEntries - 1) / kBlockEntries, all = used + 2;
  std::vector<int32_t> numbers(static_cast<size_t>(all));
  for (int64_t i = 0; i < all; ++i) numbers[static_cast<size_t>(i)] = static_cast<int32_t>(i);
  std::shuffle(numbers.begin(), numbers.end(), generator);
  Exact<int32_t> table(used);
  for (int64_t i = 0; i < used; ++i) table[i] = numbers[static_cast<size_t>(i)];
  Exact<bf16> block_keys(all * kBlockEntries * key_stride), block_values(all * kBlockEntries * value_stride);
  for (int64_t i = 0; i < block_keys.count; ++i) block_keys[i] = 0x7fc0;
  for (int64_t i = 0; i < block_values.count; ++i) block_values[i] = 0x7fc0;
  for (int64_t e = 0; e < entries; ++e) {
    const int64_t line = table[e / kBlockEntries] * kBlockEntries + e % kBlockEntries;
    std::copy_n(keys.data() + e * key_stride, key_stride, block_keys.data() + line * key_stride);
    std::copy_n(values.data() + e * value_stride, value_stride, block_values.data() + line * value_stride);
  }
  task.keys = block_keys.data() + (heads - 1) * width, task.values = block_values.data() + (heads - 1) * value_width;
  task.blocks = table.data();
  Exact<float> again(out.count);
  task.out = again.data();
  k.attend(task);
  for (int64_t i = 0; i < out.count; ++i)
    EXPECT(again[i] == out[i] || (std::isnan(again[i]) && std::isnan(out[i])), k.name,
           "attend in blocks" + what + " at" + sizes({i}));
}

// Numbers at which rounding to bf16 and exponentials could go wrong, in every place of a row.
void strange_numbers(const Kernels& k) {
  const float infinity = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  const float largest = std::numeric_limits<float>::max(), least = std::numeric_limits<float>::min();
  const float strange[] = {0.0f, -0.0f, infinity, -infinity, nan, -nan, largest, -largest, least, -least,
                           1.0f + 0x1p-8f, 1.0f + 0x3p-8f, 1.0f + 0x1p-8f + 0x1p-23f, least / 2, -least / 64};
  constexpr int64_t kCount = 16 + 7;
  for (const float value : strange)
    for (int64_t at = 0; at < kCount; ++at) {
      Exact<float> x(kCount), ones(kCount);
      Exact<bf16> out(kCount), gated(kCount);
      for (int64_t i = 0; i < kCount; ++i) x[i] = i == at ? value : 1.0f, ones[i] = 1.0f;
      k.narrow_row(x.data(), kCount, out.data());
      k.silu_times(x.data(), ones.data(), kCount, gated.data());
      // Some instructions take for 0 what is below the least normal number.
      const bool is_tiny = value != 0 && std::abs(value) < least;
      const bool rounds = std::isnan(value) ? std::isnan(widen(out[at])) : out[at] == narrow(value);
      EXPECT(rounds || (is_tiny && widen(out[at]) == 0), k.name, "narrow_row of " + std::to_string(value) + sizes({at}));
      const double gate = through_bf16(value), right = gate / (1 + std::exp(-gate)), found = widen(gated[at]);
      const bool is_silu = std::isnan(right) ? std::isnan(found) :
                           found == right || std::abs(found - right) <= 0x1p-7 * std::abs(right) + least;
      EXPECT(is_silu || value < -1000, k.name, "silu_times of " + std::to_string(value) + sizes({at}));
      for (int64_t i = 0; i < kCount; ++i)
        EXPECT(i == at || (out[i] == narrow(1.0f) && gated[i] == gated[at ? 0 : 1]), k.name,
               "a neighbour of " + std::to_string(value) + sizes({at, i}));
    }
}

void elementwise(const Kernels& k, int64_t count) {
  Exact<bf16> x(count), weight(count), out(count);
  Exact<float> gate(count), up(count);
  double squares = 0;
  for (int64_t i = 0; i < count; ++i) {
    x[i] = narrow(drawn()), weight[i] = narrow(drawn()), gate[i] = 8 * drawn(), up[i] = drawn();
    squares += static_cast<double>(widen(x[i])) * widen(x[i]);
  }
  k.rms_norm(x.data(), weight.data(), count, 1e-6f, out.data());
  const double scale = 1 / std::sqrt(squares / static_cast<double>(count) + 1e-6);
  for (int64_t i = 0; i < count; ++i) {
    const double right = widen(x[i]) * scale * widen(weight[i]);
    EXPECT(std::abs(widen(out[i]) - right) <= 0x1p-7 * std::abs(right), k.name, "rms_norm" + sizes({count, i}));
  }
  Exact<bf16> same(count);
  for (int64_t i = 0; i < count; ++i) same[i] = x[i];
  k.rms_norm(same.data(), weight.data(), count, 1e-6f, same.data());  // in place, as heads are
  for (int64_t i = 0; i < count; ++i) EXPECT(same[i] == out[i], k.name, "rms_norm in place" + sizes({count, i}));
  k.silu_times(gate.data(), up.data(), count, out.data());
  for (int64_t i = 0; i < count; ++i) {
    const double g = through_bf16(gate[i]), right = g / (1 + std::exp(-g)) * through_bf16(up[i]);
    EXPECT(std::abs(widen(out[i]) - right) <= 0x1p-7 * std::abs(right), k.name, "silu_times" + sizes({count, i}));
  }
  k.narrow_row(gate.data(), count, out.data());
  for (int64_t i = 0; i < count; ++i) EXPECT(out[i] == narrow(gate[i]), k.name, "narrow_row" + sizes({count, i}));
  Exact<float> rounded(count);
  float most = -std::numeric_limits<float>::infinity();
  for (int64_t i = 0; i < count; ++i) most = std::max(most, through_bf16(gate[i]));
  EXPECT(k.round_row(gate.data(), count, rounded.data()) == most, k.name, "round_row" + sizes({count}));
  for (int64_t i = 0; i < count; ++i)
    EXPECT(rounded[i] == through_bf16(gate[i]), k.name, "round_row" + sizes({count, i}));
  k.add_row(up.data(), count, out.data());
  for (int64_t i = 0; i < count; ++i)
    EXPECT(out[i] == narrow(widen(narrow(gate[i])) + through_bf16(up[i])), k.name, "add_row" + sizes({count, i}));
  const int64_t half = count / 2;
  k.rotate(x.data(), gate.data(), up.data(), half, out.data());
  for (int64_t i = 0; i < count; ++i) same[i] = x[i];
  k.rotate(same.data(), gate.data(), up.data(), half, same.data());
  for (int64_t i = 0; i < half; ++i) {
    const float low = widen(x[i]), high = widen(x[i + half]);
    const float first = through_bf16(low * gate[i]) + through_bf16(-high * up[i]);
    const float second = through_bf16(high * gate[i]) + through_bf16(low * up[i]);
    EXPECT(out[i] == narrow(first) && out[i + half] == narrow(second), k.name, "rotate" + sizes({count, i}));
    EXPECT(same[i] == out[i] && same[i + half] == out[i + half], k.name, "rotate in place" + sizes({count, i}));
  }
  double highest = gate[0], sum = 0;
  for (int64_t i = 0; i < count; ++i) highest = std::max(highest, static_cast<double>(gate[i]));
  for (int64_t i = 0; i < count; ++i) sum += std::exp(gate[i] - highest);
  const float found = k.sum_exponentials(gate.data(), count, static_cast<float>(highest));
  EXPECT(std::abs(found - sum) <= 1e-5 * sum, k.name, "sum_exponentials" + sizes({count}));
}

void largest(const Kernels& k, int64_t count) {
  constexpr bf16 kInfinity = 0x7f80, kNan = 0x7fc0;
  for (int style = 0; style < 6; ++style) {
    Exact<bf16> x(count);
    for (int64_t i = 0; i < count; ++i) {
      x[i] = style == 0 ? static_cast<bf16>(kInfinity | 0x8000) : narrow(static_cast<float>(below(7)) - 3.0f);
      if (style == 1) x[i] = static_cast<bf16>(below(2) << 15);  // 0 and -0 are equal
    }
    if (style == 3) x[below(count)] = kInfinity;
    if (style == 4) x[below(count)] = kNan, x[below(count)] = static_cast<bf16>(kNan | 0x8000);
    if (style == 5) x[count - 1] = narrow(9.0f);
    int64_t right = 0;
    for (int64_t i = 1; i < count; ++i) {
      const float value = widen(x[i]), best = widen(x[right]);
      if (best == best && (value != value || value > best)) right = i;
    }
    EXPECT(k.argmax(x.data(), count) == right, k.name, "argmax" + sizes({count, style}));
  }
}

// Rows of scores: their floats, the largest of every part, and exponentials with the sum of every stretch.
void scores(const Kernels& k, int64_t count) {
  const int64_t stretches = (count + kStretch - 1) / kStretch;
  Exact<bf16> x(count);
  Exact<float> wide(count), most(stretches * kParts), weights(count), sums(stretches);
  for (int64_t i = 0; i < count; ++i) x[i] = narrow(30 * drawn());
  if (count > 2) x[below(count)] = 0xff80;  // minus infinity
  k.widen_row(x.data(), count, wide.data());
  float largest = -INFINITY;
  for (int64_t i = 0; i < count; ++i) {
    EXPECT(wide[i] == widen(x[i]), k.name, "widen_row" + sizes({count, i}));
    largest = std::max(largest, wide[i]);
  }
  const auto are_right = [&] {
    for (int64_t part = 0; part < stretches * kParts; ++part) {
      const int64_t first = part / kParts * kStretch, last = std::min(first + kStretch, count);
      float right = -INFINITY;
      for (int64_t i = first + part % kParts; i < last; i += kParts) right = wide[i] > right ? wide[i] : right;
      EXPECT(most[part] == right, k.name, "maxima, part" + sizes({count, part}));
    }
  };
  EXPECT(k.maxima(wide.data(), count, most.data()) == largest, k.name, "maxima" + sizes({count}));
  are_right();
  for (const float temperature : {1.0f, 0.7f}) {
    k.weigh(wide.data(), count, temperature, largest / temperature, weights.data(), sums.data());
    for (int64_t s = 0; s < stretches; ++s) {
      double sum = 0;
      for (int64_t i = s * kStretch; i < std::min((s + 1) * kStretch, count); ++i) {
        const float power = wide[i] / temperature - largest / temperature;
        const double right = std::exp(static_cast<double>(power));
        EXPECT(std::abs(weights[i] - right) <= 3e-7 * right + 2e-38, k.name, "weigh" + sizes({count, i}));
        sum += right;
      }
      EXPECT(std::abs(sums[s] - sum) <= 1.5e-6 * sum + 1e-35, k.name, "weigh, sum" + sizes({count, s}));
    }
  }
  wide[below(count)] = std::nanf("");
  const float spoilt = k.maxima(wide.data(), count, most.data());
  EXPECT(spoilt != spoilt, k.name, "maxima, not a number" + sizes({count}));
  are_right();
}

void whole_numbers(const Kernels& k, int64_t count) {
  Exact<bf16> x(count);
  Exact<int8_t> whole(count);
  // The smallest factor makes the inverse of the largest value infinite.
  for (const float factor : {1.0f, 1e30f, 0x1p-133f, 0.0f}) {
    float most = 0;
    for (int64_t i = 0; i < count; ++i) x[i] = narrow(factor * drawn()), most = std::max(most, std::abs(widen(x[i])));
    const float scale = k.quantise(x.data(), count, whole.data());
    EXPECT(scale == most / 127, k.name, "quantise, scale" + sizes({count}));
    EXPECT(k.all_finite(x.data(), count), k.name, "all_finite" + sizes({count}));
    for (int64_t i = 0; i < count; ++i) {
      const double right = most > 0 ? 127.0 * widen(x[i]) / most : 0;
      EXPECT(std::abs(whole[i] - right) <= 0.5001 && std::abs(whole[i]) <= 127, k.name, "quantise" + sizes({count, i}));
    }
  }
  for (const bf16 odd : {0x7f80, 0xff80, 0x7fc0, 0xffff}) {
    const int64_t at = below(count);
    const bf16 before = x[at];
    x[at] = odd;
    const float scale = k.quantise(x.data(), count, whole.data());
    EXPECT(scale != scale, k.name, "quantise, not finite" + sizes({count}));
    EXPECT(!k.all_finite(x.data(), count), k.name, "all_finite, not" + sizes({count}));
    x[at] = before;
  }
}

void panels(const Kernels& k, int64_t pairs, int64_t gap) {
  const int64_t stride = 2 * pairs + gap;
  Exact<bf16> rows((kPanel - 1) * stride + 2 * pairs), to(pairs * 2 * kPanel);
  for (int64_t i = 0; i < rows.count; ++i) rows[i] = static_cast<bf16>(below(1 << 16));
  k.interleave(rows.data(), stride, pairs, to.data());
  for (int64_t i = 0; i < to.count; ++i)
    EXPECT(to[i] == rows[i % (2 * kPanel) / 2 * stride + i / (2 * kPanel) * 2 + i % 2], k.name,
           "interleave" + sizes({pairs, gap, i}));
}

// Every bf16 survives the way to fp32 and back, and halves go to even.
void roundings() {
  for (uint32_t bits = 0; bits < 0x10000u; ++bits) {
    const bf16 value = static_cast<bf16>(bits), back = narrow(widen(value));
    const bool nan = widen(value) != widen(value);
    EXPECT(nan ? widen(back) != widen(back) : back == value, "narrow", "bits" + sizes({bits}));
  }
  EXPECT(narrow(1.0f + 0x1p-8f) == 0x3f80 && narrow(1.0f + 0x3p-8f) == 0x3f82, "narrow", "halves");
  EXPECT(narrow(std::numeric_limits<float>::max()) == 0x7f80, "narrow", "overflow");
}

// What one distribution leaves of another, and shares of weights, both with the sums of their stretches.
void shares(const Kernels& k, int64_t count) {
  const int64_t stretches = (count + kStretch - 1) / kStretch;
  Exact<float> p(count), q(count);
  Exact<double> left(count), sums(stretches), right(stretches);
  for (int64_t i = 0; i < count; ++i) p[i] = std::exp(drawn()), q[i] = below(4) ? std::exp(drawn()) : 0.0f;
  const auto near = [](double a, double b) { return std::abs(a - b) <= 1e-12 * (std::abs(b) + 1); };
  k.rest(p.data(), 0.5, q.data(), 0.75, count, left.data(), sums.data());
  k.rest(p.data(), 0.5, q.data(), 0.75, count, nullptr, right.data());
  for (int64_t s = 0; s < stretches; ++s) {
    double sum = 0;
    for (int64_t i = s * kStretch; i < std::min((s + 1) * kStretch, count); ++i) {
      const double expected = std::max(p[i] * 0.5 - q[i] * 0.75, 0.0);
      EXPECT(near(left[i], expected), k.name, "rest" + sizes({count, i}));
      sum += expected;
    }
    EXPECT(near(sums[s], sum) && sums[s] == right[s], k.name, "rest, the sum" + sizes({count, s}));
  }
  for (int64_t i = 0; i < count; ++i) p[i] = i % 5 == 3 ? 1e-38f : q[i];
  k.share(p.data(), count, 0.25f, sums.data());
  for (int64_t s = 0; s < stretches; ++s) {
    double sum = 0;
    for (int64_t i = s * kStretch; i < std::min((s + 1) * kStretch, count); ++i) {
      EXPECT(p[i] == (i % 5 == 3 ? 0.0f : q[i] * 0.25f), k.name, "share" + sizes({count, i}));
      sum += p[i];
    }
    EXPECT(near(sums[s], sum), k.name, "share, the sum" + sizes({count, s}));
  }
}

}  // namespace

int main(int count, char** words) {
  const std::vector<std::string> asked(words + 1, words + count);
  int tables = 0;
  roundings();
  const char* before = kernels().name;
  for (const char* name : {"portable", "avx2", "avx512", "avx512bf16", "amx"}) {
    if (!asked.empty() && std::find(asked.begin(), asked.end(), name) == asked.end()) continue;
    if (!use_kernels(name)) continue;
    ++tables;
    const Kernels& k = kernels();
    EXPECT(std::string(k.name) == name, name, "is not what was chosen");
    for (const int64_t rows : {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 14, 15, 16, 17, 28, 32, 33, 56, 64})
      for (const int64_t panels : {1, 2, 3, 4, 5, 8})
        for (const int64_t pairs : {1, 2, 5, 16, 21, 48}) products(k, rows, pairs, panels, (rows + pairs) % 3);
    // Panels that are longer than a stretch, and more rows than are taken at a time.
    for (const int64_t rows : {1, 2, 4, 9, 64, 65, 131})
      for (const int64_t panels : {1, 3}) products(k, rows, 1061, panels, rows % 3);
    for (const int64_t rows : {0, 1, 2, 3, 6, 7, 8, 9, 10, 17, 33})
      for (const int64_t panels : {1, 2, 3, 4, 6})
        for (const int64_t quads : {1, 2, 9, 16, 37}) whole_products(k, rows, quads, panels);
    for (const int64_t rows : {0, 1, 2, 3, 4, 6, 7, 13, 17})
      for (const int64_t panels : {1, 2, 3, 4, 5, 8})
        for (const int64_t inputs : {1, 31, 32, 33, 100, 192}) grouped_products(k, rows, inputs, panels);
    for (const int64_t rows : {1, 2, 3, 4, 6})
      for (const int64_t panels : {1, 2, 3})
        for (const int64_t groups : {1, 2}) largest_products(k, rows, groups, panels);
    for (const int64_t groups : {1, 2, 3, 7})
      for (const int64_t width : {1, 8, 12, 15, 16, 33, 64, 80})
        for (const int64_t committed : {0, 5, 37})
          for (const int64_t nodes : {1, 2, 16, 19})
            attention(k, nodes, groups, width, width + (groups == 3 ? 5 : 0), committed, below(2) ? 1000 : 9, below(2),
                      nodes > 1 && below(2));
    for (const int64_t nodes : {1, 5, 33, 70})  // more places than are packed at a time, and more queries
      for (const int64_t window : {1, 31, 32, 100, 1000})
        for (const bool chain : {false, true})
          for (const bool broken : {false, nodes > 1}) attention(k, nodes, 2, 32, 32, 270, window, chain, broken);
    for (const int64_t nodes : {40, 41, 42})  // an early entry that is no number, or keys that are none behind finite values
      for (const int64_t window : {32, 1000})
        for (const bool early : {false, true})
          for (const bool keys_alone : {false, true})
            attention(k, nodes, 2, 32, 32, 60, window, true, true, early, keys_alone);
    for (const int64_t width : {12, 16, 34, 80, 272})  // tiles that are filled up with zeros, and panels
      for (const int64_t nodes : {11, 12, 85, 86})     // up to as many queries as are taken at once, and more
        attention(k, nodes, 3, width, width + 5, below(300), below(2) ? 1000 : 40, true, false);
    attention(k, 2, 71, 16, 16, 20, 1000, false, false);
    for (const int64_t width : {128, 256, 272})  // wide heads, and wider than are packed
      for (const int64_t window : {71, 1000})
        for (const bool chain : {false, true}) attention(k, 17, 2, width, width, 150, window, chain, true);
    for (const int64_t pairs : {0, 1, 7, 8, 9, 15, 16, 17, 31, 32, 40, 65})
      for (const int64_t gap : {0, 1, 2, 33}) panels(k, pairs, gap);
    strange_numbers(k);
    for (const int64_t count : {1, 2, 15, 16, 17, 31, 32, 48, 63, 64, 65, 127, 128, 129, 513, 1100}) {
      elementwise(k, count);
      largest(k, count);
      whole_numbers(k, count);
      scores(k, count);
      shares(k, count);
    }
  }
  EXPECT(!use_kernels("nothing"), "nothing", "was found");
  EXPECT(use_kernels(before), before, "is gone");
  std::printf("%d instruction sets, %d failures\n", tables, failures);
  return failures == 0 && tables > 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
