// The native forward of a Llama-shaped model over a draft tree: decoder.cpp makes and calls it, decoder_layers.cpp is what its
// threads do, and guesses.cpp lets it go on from its own choices.
#pragma once
#include <mutex>
#include <optional>
#include <tuple>
#include <vector>

#include "objects.h"
#include "packed.h"
#include "pass.h"

namespace draftsmith {

// Memory of a pass, kept for the next one: fresh pages would cost as much as a layer.
template <class T>
struct Scratch {
  Lined<T> memory;
  T* of(int64_t count) {
    if (static_cast<int64_t>(memory.size()) < count) memory.resize(count);
    return memory.data();
  }
};

// Where chains of guesses end: behind the first guess at which the chance that the target chooses the same, and all guesses
// before it, is below `least`. The scores by which two tokens are told apart differ from the target's by `spread`: the
// standard deviation of what is taken to be a normal distribution. `least` 0 lets no chain end.
struct Bound {
  double least = 0, spread = 0;
  // Returns the chance that the target chooses as well what leads by so much.
  double chance(double lead) const;
};

// A guess, the token that comes next to it, and by how much its score leads that of the other.
struct Chosen {
  int64_t token, other;
  double lead;
};

class Decoder : public Object {
 public:
  // sizes: width, heads, key_heads, head_width, inner, vocabulary, max_length; factors: epsilon, scale, rotary_scale.
  // weights: query, key, value, out, gate, up, down of every layer, then the head, packed as bf16, int8 or int4; scales
  // and sums of the int8 ones, else empty; biases in fp32, empty for none.
  // norms: input and after-attention norm of every layer, then the last; head_norms: query and key of every layer.
  // embedding: (V, F) dense, or the head's packed weights.
  Decoder(Tensor embedding, Tensors weights, Tensors scales, Tensors sums, Tensors biases, Tensors norms,
          Tensors head_norms, Tensor frequencies, std::vector<int64_t> sizes, std::vector<double> factors,
          std::vector<int64_t> windows);

  // Reads the nodes (B, M) behind `cached` tokens of every row, and writes their keys and values there. Row b lies in
  // slot slots[b] of the cache, or b without slots, and has counts[b] of the nodes, or all. With tables (slots, J), a slot is made
  // of blocks of the cache, and block tables[slot, j] holds its j-th part.
  // Returns the logits (B, M or columns, V) and the tapped states (B, M, F · taps). Of nodes that a row does not have,
  // the logits are anything, and the states zero. Without depths and visible every row is a chain.
  std::tuple<Tensor, Tensor> forward(const Tensor& tokens, const std::optional<Tensor>& depths,
                                     const std::optional<Tensor>& visible, const Tensor& cached, const Tensors& keys,
                                     const Tensors& values, const std::optional<Tensor>& tables,
                                     const std::optional<Tensor>& slots, const std::optional<Tensor>& counts,
                                     std::vector<int64_t> taps, const std::optional<Tensor>& columns);

  // Reads the roots (B) as `forward` reads nodes, then what it chooses behind them, and so on, up to `depth` times in all.
  // Returns the choices (B, depth), with -1 where a chain has ended; and, under a bound, what else the target may well choose
  // instead of each, -1 for nothing.
  std::tuple<Tensor, Tensor> guess(const Tensor& roots, const Tensor& cached, const Tensors& keys, const Tensors& values,
               const std::optional<Tensor>& tables, const std::optional<Tensor>& slots, int64_t depth,
               const Bound& bound);

  // The same with choices that are drawn, at temperatures (fp32) and by the noise of seeds, positions (of the guesses behind
  // the roots) and a stream. Returns the same, and what the choices were drawn from (B, depth, V), in fp32; by the target's
  // own noise only what the last ones were drawn from (B, 1, V).
  std::tuple<Tensor, Tensor, Tensor> draw(const Tensor& roots, const Tensor& cached, const Tensors& keys, const Tensors& values,
                                  const std::optional<Tensor>& tables, const std::optional<Tensor>& slots, int64_t depth,
                                  const Tensor& temperature_B, const Tensor& seeds_B, const Tensor& positions_B,
                                  int64_t stream, const Bound& bound);

 private:
  static constexpr int64_t kOwnRows = 4;  // so few are normed faster than a barrier is passed

  struct Layer {
    Linear query, key, value, out, gate, up, down;
    const bf16 *input_norm, *after_norm;
    const bf16 *query_norm = nullptr, *key_norm = nullptr;
    int64_t window = 0;  // 0 for none
  };

  // The numbers of the jobs of a pass that are taken piece by piece. A product has one for every group of near rows.
  struct Jobs {
    bool by_heads = false;  // whether the thread that takes a key head also projects what it reads
    int64_t layers = 0, width_groups = 0, out_groups = 0, inner_groups = 0, head_groups = 0;

    int64_t of_layer() const { return 1 + (by_heads ? 1 : 4) * width_groups + out_groups + inner_groups; }
    int64_t attend(int64_t layer) const { return layer * of_layer(); }
    int64_t out(int64_t layer) const { return attend(layer) + 1; }
    int64_t down(int64_t layer) const { return out(layer) + out_groups; }
    int64_t gate(int64_t layer) const { return down(layer) + inner_groups; }
    int64_t project(int64_t layer, int64_t which) const { return gate(layer) + (1 + which) * width_groups; }
    int64_t head() const { return layers * of_layer(); }
    int64_t all() const { return head() + head_groups; }
  };

  // Rows of normed, mixed, inner and wanted lie apart by the strides below, all others one right after the other.
  struct Buffers {
    bf16 *hidden, *normed, *query, *key, *mixed, *inner, *wanted;
    float *cosines, *sines, *private_floats;
    int64_t private_size;
    Quantised* rooms;  // one for each thread
    Pieces* pieces;
    Jobs jobs;
  };

  Linear linear(size_t index, int64_t outputs, int64_t inputs) const;
  // Takes all memory that passes of this one's size need.
  Buffers prepare(const Pass& pass, int64_t threads);
  // Says which nodes attend together: as many of a row as a task takes, or fewer, so that all threads have enough to do.
  void divide(const Pass& pass, int64_t threads);

  // Reads the roots of rows, then what choose(team, level, buffers, states, chosen) chooses for every row, and so on.
  template <class Choose>
  void follow(const Tensor& guesses, const Tensor& others, const Tensor& roots, const Tensor& cached, const Tensors& keys,
              const Tensors& values, const std::optional<Tensor>& tables, const std::optional<Tensor>& slots,
              const Bound& bound, const Choose& choose);

  // What follows is done by all threads of a team together.
  // Returns the states behind the last norm, as normed ones lie; tapped ones go into the features.
  const bf16* read(const Team& team, const Pass& pass, const Buffers& b, bf16* features) const;
  // Returns the states of all rows, normed: by every thread for itself where they are few.
  const bf16* norm_rows(const Team& team, const bf16* weight, int64_t rows, const Buffers& b) const;
  template <class Multiply>
  void project_each(const Pass& pass, const Layer& layer, size_t index, const Buffers& b,
                    const Multiply& multiply) const;
  void project(const Team& team, const Pass& pass, const Layer& layer, size_t index, const bf16* normed,
               const Buffers& b) const;
  // The queries and the key of a row that belong to a key head.
  void rotate(const Pass& pass, const Layer& layer, size_t index, int64_t row, int64_t key_head, const Buffers& b) const;
  void attend(const Team& team, const Pass& pass, const Layer& layer, size_t index, const Buffers& b) const;
  void attend_by_heads(const Team& team, const Pass& pass, const Layer& layer, size_t index, const bf16* normed,
                       const Buffers& b) const;
  // The nodes of a row from `node` on, as many as attend together, over one key head.
  void attend_some(const Team& team, const Pass& pass, const Layer& layer, size_t index, int64_t row,
                   int64_t node, int64_t head, const Buffers& b) const;
  // All jobs of a pass.
  void deal(const Team& team, const Buffers& b) const;
  void add(const Team& team, const Linear& layer, const bf16* from, int64_t stride, int64_t rows, const Buffers& b,
           const void* ahead, int64_t job) const;
  void gate(const Team& team, const Layer& layer, const bf16* normed, const Buffers& b, int64_t rows, int64_t job) const;
  void tap(const Team& team, const Pass& pass, int64_t which, const bf16* states, int64_t stride, bf16* features) const;
  // Logits of states behind the last norm, to store(row, first token, count, values); once a pass.
  template <class Store>
  void score(const Team& team, const Buffers& b, const bf16* states, int64_t rows, const Store& store) const {
    multiply_pieces(team, head_, factors_for(head_, states, normed_stride_, rows, b.rooms[team.index]), rows, store,
                    layers_.front().query.begin(team), *b.pieces, b.jobs.head());
  }
  void score_nodes(const Team& team, const Pass& pass, const bf16* normed, const Buffers& b, bf16* logits) const;

  Tensor embedding_;
  Tensors weights_, scales_, sums_, biases_, norms_, head_norms_;
  Tensor frequencies_;
  Shape shape_;
  Linear head_;
  const bf16* last_norm_;
  int64_t normed_stride_ = 0, mixed_stride_ = 0, inner_stride_ = 0;  // see `apart`; that of wanted is normed's
  std::vector<Layer> layers_;
  std::mutex busy_;  // the memory below serves one pass at a time
  Scratch<bf16> hidden_, normed_, query_, key_, mixed_, inner_, wanted_;
  Scratch<float> cosines_, sines_, private_floats_;
  std::vector<Quantised> rooms_;
  Pieces pieces_;
  int64_t task_nodes_ = 1;                          // of a row, that attend together
  std::vector<std::pair<int64_t, int64_t>> tasks_;  // row and first node of those
  int64_t most_inputs_ = 0;  // of any layer
};

}  // namespace draftsmith
