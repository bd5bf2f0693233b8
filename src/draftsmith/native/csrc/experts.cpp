// The experts of a mixture: a gated SiLU feed-forward for each, every token through a few of them.
//
// Words: R rows (tokens), E experts, C experts a row, F width of the model, I inner width.
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <vector>

#include "packed.h"

namespace draftsmith {
namespace {

// gate_up is (E, panels, pairs, 16, 2) of 2 · I outputs, gates first; down the same of F outputs. An index of E means
// none.
// A row's experts are summed in the order of their numbers, in bf16, as transformers does.
at::Tensor experts(const at::Tensor& hidden, const at::Tensor& index, const at::Tensor& weights,
                   const at::Tensor& gate_up, const at::Tensor& down, int64_t inner) {
  TORCH_CHECK(hidden.dim() == 2 && hidden.is_contiguous() && hidden.scalar_type() == at::kBFloat16 &&
                  index.dim() == 2 && index.size(0) == hidden.size(0) && index.sizes() == weights.sizes() &&
                  gate_up.dim() == 5 && down.dim() == 5 && gate_up.is_contiguous() && down.is_contiguous() &&
                  gate_up.size(0) == down.size(0),
              "draftsmith: rows, choices and experts do not fit together");
  const int64_t rows = hidden.size(0), width = hidden.size(1), count = gate_up.size(0), chosen = index.size(1);
  TORCH_CHECK(width % 2 == 0 && inner % 2 == 0, "draftsmith: experts have to be of even widths");
  const at::Tensor index_RC = index.to(at::kLong).contiguous(), weights_RC = weights.to(at::kFloat).contiguous();
  const int64_t* choice = index_RC.const_data_ptr<int64_t>();
  std::vector<std::vector<std::pair<int64_t, float>>> work(count);
  for (int64_t i = 0; i < rows * chosen; ++i) {
    TORCH_CHECK_INDEX(choice[i] >= 0 && choice[i] <= count, "draftsmith: there is no expert ", choice[i]);
    if (choice[i] < count) work[choice[i]].emplace_back(i / chosen, weights_RC.const_data_ptr<float>()[i]);
  }
  at::Tensor out = at::zeros_like(hidden);
  const bf16* from = bits(hidden);
  bf16* to = mutable_bits(out);
  std::vector<bf16> gathered(rows * width), gates(rows * 2 * inner), mixed(rows * inner);
  const int64_t threads = at::get_num_threads();
  std::vector<float> wider(threads * 2 * inner);
  Quantised none;  // the weights are bf16
  for (int64_t e = 0; e < count; ++e) {
    const auto& mine = work[e];
    const int64_t some = static_cast<int64_t>(mine.size());
    if (some == 0) continue;
    const Linear up = as_linear(gate_up[e], std::nullopt, 2 * inner, width);
    const Linear back = as_linear(down[e], std::nullopt, width, inner);
    for (int64_t i = 0; i < some; ++i) std::copy_n(from + mine[i].first * width, width, gathered.data() + i * width);
    run_team(threads, [&](const Team& team) {
      multiply(team, up, gathered.data(), width, some, [&](int64_t r, int64_t n, int64_t size, const float* values) {
        kernels().narrow_row(values, size, gates.data() + r * 2 * inner + n);
      }, none, back.begin(team));
      team.barrier();
      const auto [first, last] = team.share(some);
      float* wide = wider.data() + team.index * 2 * inner;
      for (int64_t r = first; r < last; ++r) {
        for (int64_t i = 0; i < 2 * inner; ++i) wide[i] = widen(gates[r * 2 * inner + i]);
        kernels().silu_times(wide, wide + inner, inner, mixed.data() + r * inner);
      }
      team.barrier();
      multiply(team, back, mixed.data(), inner, some, [&](int64_t r, int64_t n, int64_t size, const float* values) {
        bf16* sum = to + mine[r].first * width + n;
        for (int64_t i = 0; i < size; ++i)
          sum[i] = narrow(widen(sum[i]) + through_bf16(through_bf16(values[i]) * mine[r].second));
      }, none, up.begin(team));
    });
  }
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(draftsmith, library) {
  library.def(
      "experts(Tensor hidden, Tensor index, Tensor weights, Tensor gate_up, Tensor down, int inner) -> Tensor");
}

TORCH_LIBRARY_IMPL(draftsmith, Autograd, library) {
  library.impl("experts", torch::autograd::autogradNotImplementedFallback());
}

TORCH_LIBRARY_IMPL(draftsmith, CPU, library) { library.impl("experts", experts); }

}  // namespace draftsmith
