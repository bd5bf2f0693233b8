// Prompt lookup: growing texts, where each of their n-grams was followed by what, and drafts of what followed.
//
// Words: B rows, T context tokens, N drafted nodes.

#include "ngrams.h"

#include <mutex>
#include <unordered_map>

#include "objects.h"
#include "operators.h"

namespace draftsmith {
namespace {

constexpr int64_t kRoot = -1, kUnused = -2;

// What was committed, piece by piece: rows and counts (B), tokens (B, T).
struct News {
  Tensor rows_B, counts_B, tokens_BT;

  News(const Tensor& rows, const Tensor& counts, const Tensor& tokens)
      : rows_B(rows.contiguous()), counts_B(counts.contiguous()), tokens_BT(tokens.contiguous()) {
    REQUIRE(rows_B.dim() == 1 && tokens_BT.dim() == 2 && counts_B.sizes() == rows_B.sizes() &&
                tokens_BT.size(0) == rows_B.numel(),
            "draftsmith: committed tokens take rows (B), counts (B) and tokens (B, T)");
    for (int64_t b = 0; b < batch(); ++b)
      REQUIRE_INDEX(count(b) >= 0 && count(b) <= tokens_BT.size(1), "draftsmith: a row has no ", count(b), " of ",
                    tokens_BT.size(1), " tokens");
  }

  int64_t batch() const { return rows_B.numel(); }
  int64_t row(int64_t b) const { return rows_B.const_data_ptr<int64_t>()[b]; }
  int64_t count(int64_t b) const { return counts_B.const_data_ptr<int64_t>()[b]; }
  const int64_t* tokens(int64_t b) const { return tokens_BT.const_data_ptr<int64_t>() + b * tokens_BT.size(1); }
};

class Ngrams : public Object {
 public:
  Ngrams(int64_t shortest, int64_t longest) : shortest_(shortest), longest_(longest) {
    REQUIRE(shortest > 0 && shortest <= longest, "draftsmith: n-grams have from ", shortest, " to ", longest, " tokens");
  }

  void read(const Tensors& rows, const Tensors& counts, const Tensors& tokens) {
    const std::lock_guard<std::mutex> alone(busy_);
    take_in(rows, counts, tokens);
  }

  // Returns tokens and parents (2, B, N), and how deep the deepest of them lies.
  std::tuple<Tensor, int64_t> draft(const Tensors& rows, const Tensors& counts, const Tensors& tokens, const Wish& wish,
                                    int64_t guesses, int64_t room, double factor) {
    const std::lock_guard<std::mutex> alone(busy_);
    REQUIRE(!rows.empty() && guesses > 0 && room > 0, "draftsmith: a draft is of somebody, and has guesses");
    REQUIRE(factor >= 0, "draftsmith: a match is worth ", factor, " guesses for each of its tokens");
    take_in(rows, counts, tokens);
    const Tensor rows_B = rows.back().contiguous();
    const int64_t batch = rows_B.numel();
    std::vector<std::vector<int64_t>> trees(batch), above(batch);
    int64_t width = 0, depth = 0;
    for (int64_t b = 0; b < batch; ++b) {
      const int64_t number = rows_B.const_data_ptr<int64_t>()[b];
      if (number < 0) continue;
      LookupRow& row = row_of(number);
      for (const int32_t place : row.places(wish, {})) {
        int64_t parent = kRoot;
        const int64_t fitting = std::min(guesses, room - static_cast<int64_t>(trees[b].size()));
        const std::vector<int64_t> path = row.copy(place, row.worth(place, fitting, factor, {}), {});
        for (const int64_t token : path) {
          above[b].push_back(parent), parent = trees[b].size(), trees[b].push_back(token);
        }
        depth = std::max<int64_t>(depth, path.size());
      }
      width = std::max<int64_t>(width, trees[b].size());
    }
    Tensor found_2BN = full<int64_t>({2, batch, width}, 0);
    int64_t *tokens_to = found_2BN.mutable_data_ptr<int64_t>(), *parents_to = tokens_to + batch * width;
    std::fill_n(parents_to, batch * width, kUnused);
    for (int64_t b = 0; b < batch; ++b) {
      std::copy(trees[b].begin(), trees[b].end(), tokens_to + b * width);
      std::copy(above[b].begin(), above[b].end(), parents_to + b * width);
    }
    return {found_2BN, depth};
  }

  std::vector<int64_t> go_on(int64_t number, const std::vector<int64_t>& ahead, bool frequent, int64_t count,
                             double factor) {
    const std::lock_guard<std::mutex> alone(busy_);
    const auto row = rows_.find(number);
    REQUIRE(row != rows_.end() && count > 0, "draftsmith: guesses are asked for behind a text, at least one");
    const std::vector<int32_t> found = row->second.places({1, frequent}, ahead);
    if (found.empty()) return {};
    return row->second.copy(found[0], row->second.worth(found[0], count, factor, ahead), ahead);
  }

  void leave(const std::vector<int64_t>& numbers) {
    const std::lock_guard<std::mutex> alone(busy_);
    for (const int64_t number : numbers) rows_.erase(number);
  }

 private:
  void take_in(const Tensors& rows, const Tensors& counts, const Tensors& tokens) {
    REQUIRE(rows.size() == counts.size() && rows.size() == tokens.size(), "draftsmith: these are no committed tokens");
    std::vector<News> all;  // looked at before any of them is taken in
    for (size_t i = 0; i < rows.size(); ++i) all.emplace_back(rows[i], counts[i], tokens[i]);
    for (const News& news : all)
      for (int64_t b = 0; b < news.batch(); ++b)
        if (news.row(b) >= 0) row_of(news.row(b)).extend(news.tokens(b), news.count(b));  // others are padding
  }

  LookupRow& row_of(int64_t number) { return rows_.try_emplace(number, shortest_, longest_).first->second; }

  const int64_t shortest_, longest_;
  std::mutex busy_;
  std::unordered_map<int64_t, LookupRow> rows_;
};

int64_t make_ngrams(int64_t shortest, int64_t longest) { return keep(std::make_shared<Ngrams>(shortest, longest)); }

void read_ngrams(int64_t number, const Tensors& rows, const Tensors& counts, const Tensors& tokens) {
  kept<Ngrams>(number)->read(rows, counts, tokens);
}

std::tuple<Tensor, int64_t> draft_ngrams(int64_t number, const Tensors& rows, const Tensors& counts,
                                         const Tensors& tokens, int64_t places, bool frequent, int64_t guesses,
                                         int64_t room, double factor) {
  return kept<Ngrams>(number)->draft(rows, counts, tokens, {places, frequent}, guesses, room, factor);
}

std::vector<int64_t> continue_ngrams(int64_t number, int64_t row, const std::vector<int64_t>& ahead, bool frequent,
                                     int64_t count, double factor) {
  return kept<Ngrams>(number)->go_on(row, ahead, frequent, count, factor);
}

void forget_ngrams(int64_t number, const std::vector<int64_t>& rows) { kept<Ngrams>(number)->leave(rows); }

}  // namespace

void define_ngrams(Library& library) {
  library.def_without_tensors<make_ngrams>("make_ngrams(int shortest, int longest) -> int");
  library.def<read_ngrams>("read_ngrams(int number, Tensor[] rows, Tensor[] counts, Tensor[] tokens) -> ()");
  library.def<draft_ngrams>(
      "draft_ngrams(int number, Tensor[] rows, Tensor[] counts, Tensor[] tokens, int places, bool frequent, "
      "int guesses, int room, float factor) -> (Tensor, int)");
  library.def_without_tensors<continue_ngrams>(
      "continue_ngrams(int number, int row, int[] ahead, bool frequent, int count, float factor) -> int[]");
  library.def_without_tensors<forget_ngrams>("forget_ngrams(int number, int[] rows) -> ()");
}

}  // namespace draftsmith
