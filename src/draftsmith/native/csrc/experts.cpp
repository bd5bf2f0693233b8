// The experts of a mixture: a gated SiLU feed-forward for each, every token through a few of them.
//
// Words: R rows (tokens), E experts, C experts a row, F width of the model, I inner width.

#include <vector>

#include "operators.h"
#include "packed.h"

namespace draftsmith {
namespace {

// The layer of expert e: of parts (weights) in bf16 or int4, or (weights, scales, sums) in int8, each of E along the
// first dimension. The parts outlive the layer.
Linear expert(const Tensors& parts, int64_t e, int64_t outputs, int64_t inputs) {
  if (parts.size() == 1 && parts[0].scalar_type() == kByte)
    return as_linear_int4(parts[0][e], std::nullopt, outputs, inputs);
  if (parts.size() == 1) return as_linear(parts[0][e], std::nullopt, outputs, inputs);
  return as_linear_int8(parts[0][e], parts[1][e], parts[2][e], std::nullopt, outputs, inputs);
}

// The number of experts that the parts are of.
int64_t check_parts(const Tensors& parts) {
  REQUIRE(parts.size() == 1 || parts.size() == 3, "draftsmith: experts are of one tensor, or of three in int8");
  for (const Tensor& part : parts)
    REQUIRE(part.dim() > 1 && part.is_contiguous() && part.size(0) == parts[0].size(0),
            "draftsmith: the parts of experts do not fit together");
  return parts[0].size(0);
}

// gate_up are the parts of 2 · I outputs, gates first; down those of F outputs. An index of E means none.
// A row's experts are summed in the order of their numbers, in bf16, as transformers does.
Tensor experts(const Tensor& hidden, const Tensor& index, const Tensor& weights, const Tensors& gate_up,
                   const Tensors& down, int64_t inner) {
  REQUIRE(hidden.dim() == 2 && hidden.is_contiguous() && hidden.scalar_type() == kBFloat16 &&
              index.dim() == 2 && index.size(0) == hidden.size(0) && index.sizes() == weights.sizes() &&
              check_parts(gate_up) == check_parts(down),
          "draftsmith: rows, choices and experts do not fit together");
  const int64_t rows = hidden.size(0), width = hidden.size(1), count = gate_up[0].size(0), chosen = index.size(1);
  REQUIRE(width % 2 == 0 && inner % 2 == 0, "draftsmith: experts have to be of even widths");
  const Tensor index_RC = index.to(kLong).contiguous(), weights_RC = weights.to(kFloat).contiguous();
  const int64_t* choice = index_RC.const_data_ptr<int64_t>();
  std::vector<std::vector<std::pair<int64_t, float>>> work(count);
  for (int64_t i = 0; i < rows * chosen; ++i) {
    REQUIRE_INDEX(choice[i] >= 0 && choice[i] <= count, "draftsmith: there is no expert ", choice[i]);
    if (choice[i] < count) work[choice[i]].emplace_back(i / chosen, weights_RC.const_data_ptr<float>()[i]);
  }
  Tensor out = full<bf16>({rows, width}, 0);
  const bf16* from = bits(hidden);
  bf16* to = mutable_bits(out);
  Lined<bf16> gathered(rows * width), gates(rows * 2 * inner), mixed(rows * inner);
  const int64_t threads = get_num_threads();
  std::vector<float> wider(threads * 2 * inner);
  std::vector<Quantised> rooms(threads);
  if (gate_up[0].scalar_type() != kBFloat16 || down[0].scalar_type() != kBFloat16)
    for (Quantised& room : rooms) room.reserve(rows, std::max(width, inner));
  std::vector<int64_t> busy;
  for (int64_t e = 0; e < count; ++e)
    if (!work[e].empty()) busy.push_back(e);
  for (size_t i = 0; i < busy.size(); ++i) {
    const auto& mine = work[busy[i]];
    const int64_t some = static_cast<int64_t>(mine.size());
    const Linear up = expert(gate_up, busy[i], 2 * inner, width), back = expert(down, busy[i], width, inner);
    // What comes after the last is not known here.
    const Linear following = i + 1 < busy.size() ? expert(gate_up, busy[i + 1], 2 * inner, width) : back;
    for (int64_t r = 0; r < some; ++r) std::copy_n(from + mine[r].first * width, width, gathered.data() + r * width);
    run_team(threads, [&](const Team& team) {
      multiply(team, up, gathered.data(), width, some, [&](int64_t r, int64_t n, int64_t size, const float* values) {
        kernels().narrow_row(values, size, gates.data() + r * 2 * inner + n);
      }, rooms[team.index], back.begin(team));
      team.barrier();
      const auto [first, last] = team.share(some);
      float* wide = wider.data() + team.index * 2 * inner;
      for (int64_t r = first; r < last; ++r) {
        for (int64_t n = 0; n < 2 * inner; ++n) wide[n] = widen(gates[r * 2 * inner + n]);
        kernels().silu_times(wide, wide + inner, inner, mixed.data() + r * inner);
      }
      team.barrier();
      multiply(team, back, mixed.data(), inner, some, [&](int64_t r, int64_t n, int64_t size, const float* values) {
        bf16* sum = to + mine[r].first * width + n;
        for (int64_t m = 0; m < size; ++m)
          sum[m] = narrow(widen(sum[m]) + through_bf16(through_bf16(values[m]) * mine[r].second));
      }, rooms[team.index], following.begin(team));
    });
  }
  return out;
}

}  // namespace

void define_experts(Library& library) {
  library.def<experts>(
      "experts(Tensor hidden, Tensor index, Tensor weights, Tensor[] gate_up, Tensor[] down, int inner) -> Tensor");
}

}  // namespace draftsmith
