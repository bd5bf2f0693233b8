// Prompt lookup: growing texts, where each of their n-grams was followed by what, and drafts of what followed.
//
// drafters/lookup/ngram.py says what is computed. Words: B rows, T context tokens, N drafted nodes.

#include <algorithm>
#include <limits>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "objects.h"
#include "operators.h"

namespace draftsmith {
namespace {

constexpr int32_t kNowhere = -1;
constexpr int64_t kMostPlaces = 64, kRoot = -1, kUnused = -2;

// The places of a text behind its n-grams of one length.
class Grams {
 public:
  explicit Grams(int64_t n) : n_(n), latest_(16, kNowhere) {}

  int64_t length() const { return n_; }

  // Files the places of a text up to its end; what follows the last n-gram is not known yet.
  void index(const std::vector<int64_t>& text) {
    for (int64_t place = earlier_.size(); place < static_cast<int64_t>(text.size()); ++place) {
      if (place < n_) {
        earlier_.push_back(kNowhere);
        continue;
      }
      int32_t& newest = latest_[find(text, text.data() + place - n_)];
      if (newest == kNowhere && 2 * ++used_ > latest_.size()) {
        widen(text);
        earlier_.push_back(kNowhere);
        latest_[find(text, text.data() + place - n_)] = static_cast<int32_t>(place);
        continue;
      }
      earlier_.push_back(newest);
      newest = static_cast<int32_t>(place);
    }
  }

  // The latest place behind an n-gram, and the one before a place.
  int32_t latest(const std::vector<int64_t>& text, const int64_t* gram) const { return latest_[find(text, gram)]; }
  int32_t before(int32_t place) const { return earlier_[place]; }

 private:
  // Where the latest place behind an n-gram is noted, or will be. There is always an empty entry.
  size_t find(const std::vector<int64_t>& text, const int64_t* gram) const {
    uint64_t hash = 0;
    for (int64_t i = 0; i < n_; ++i) hash = (hash ^ static_cast<uint64_t>(gram[i])) * 0x9E3779B97F4A7C15u, hash ^= hash >> 29;
    const size_t mask = latest_.size() - 1;
    size_t at = hash & mask;
    while (latest_[at] != kNowhere && !std::equal(gram, gram + n_, text.data() + latest_[at] - n_)) at = (at + 1) & mask;
    return at;
  }

  void widen(const std::vector<int64_t>& text) {
    std::vector<int32_t> before(2 * latest_.size(), kNowhere);
    before.swap(latest_);
    for (const int32_t place : before)
      if (place != kNowhere) latest_[find(text, text.data() + place - n_)] = place;
  }

  int64_t n_;
  size_t used_ = 0;
  std::vector<int32_t> latest_, earlier_;
};

struct Wish {
  int64_t places;   // so many, each with another token there
  bool frequent;    // of equally long matches, not the latest but what followed most often
  int64_t shortest; // so many of the newest tokens have to stand before a place
};

class Row {
 public:
  Row(int64_t shortest, int64_t longest) {
    for (int64_t n = shortest; n <= longest; ++n) grams_.emplace_back(n);
  }

  void extend(const int64_t* tokens, int64_t count) {
    REQUIRE(text_.size() + count < std::numeric_limits<int32_t>::max(), "draftsmith: a text is too long to be looked up");
    text_.insert(text_.end(), tokens, tokens + count);
  }

  // Where to go on from behind the text and `ahead`, longer matches first.
  std::vector<int32_t> places(const Wish& wish, const std::vector<int64_t>& ahead) {
    const int64_t longest = grams_.back().length(), size = text_.size();
    std::vector<int64_t> newest(text_.end() - std::min(size, longest), text_.end());
    newest.insert(newest.end(), ahead.begin(), ahead.end());
    std::vector<int32_t> found;
    // Whatever follows so many tokens also follows the longest n-gram of them.
    const size_t lengths = wish.shortest >= longest ? 1 : grams_.size();
    for (size_t i = 0; i < lengths; ++i) {
      Grams& grams = grams_[grams_.size() - 1 - i];
      grams.index(text_);
      const int64_t n = grams.length();
      if (n > static_cast<int64_t>(newest.size())) continue;
      struct First {
        int32_t place;
        int64_t times;
      };
      std::vector<First> firsts;
      int32_t place = grams.latest(text_, newest.data() + newest.size() - n);
      for (int64_t left = kMostPlaces; place != kNowhere && left > 0; --left, place = grams.before(place)) {
        if (!wish.frequent && static_cast<int64_t>(firsts.size()) >= wish.places) break;
        if (wish.shortest > n && !repeats(place, wish.shortest)) continue;
        const auto same = [&](const First& one) { return text_[one.place] == text_[place]; };
        const auto known = std::find_if(firsts.begin(), firsts.end(), same);
        if (known == firsts.end())
          firsts.push_back({place, 1});
        else
          ++known->times;
      }
      if (wish.frequent)
        std::stable_sort(firsts.begin(), firsts.end(), [](const First& a, const First& b) { return a.times > b.times; });
      for (const First& one : firsts) {
        const auto same = [&](int32_t other) { return text_[other] == text_[one.place]; };
        if (std::none_of(found.begin(), found.end(), same)) found.push_back(one.place);
      }
      if (static_cast<int64_t>(found.size()) >= wish.places) break;
    }
    if (static_cast<int64_t>(found.size()) > wish.places) found.resize(wish.places);
    return found;
  }

  // So many tokens from a place on; behind the end of text and `ahead` the copy goes on with itself.
  std::vector<int64_t> copy(int32_t place, int64_t count, const std::vector<int64_t>& ahead) const {
    const int64_t size = text_.size();
    std::vector<int64_t> piece(text_.begin() + place, text_.begin() + std::min(size, place + count));
    const int64_t more = std::min<int64_t>(count - piece.size(), ahead.size());
    piece.insert(piece.end(), ahead.begin(), ahead.begin() + more);
    const size_t whole = piece.size();
    for (size_t i = whole; i < static_cast<size_t>(count); ++i) piece.push_back(piece[i - whole]);
    return piece;
  }

 private:
  // Whether so many of the newest tokens stand before a place too.
  bool repeats(int32_t place, int64_t tokens) const {
    return tokens <= place && std::equal(text_.end() - tokens, text_.end(), text_.begin() + place - tokens);
  }

  std::vector<int64_t> text_;
  std::vector<Grams> grams_;
};

// What was committed, piece by piece: rows and counts (B), tokens (B, T).
struct News {
  Tensor rows_B, counts_B, tokens_BT;

  News(const Tensor& rows, const Tensor& counts, const Tensor& tokens)
      : rows_B(rows.contiguous()), counts_B(counts.contiguous()), tokens_BT(tokens.contiguous()) {
    REQUIRE(rows_B.dim() == 1 && tokens_BT.dim() == 2 && counts_B.sizes() == rows_B.sizes() &&
                tokens_BT.size(0) == rows_B.numel(),
            "draftsmith: committed tokens take rows (B), counts (B) and tokens (B, T)");
  }

  int64_t batch() const { return rows_B.numel(); }
  int64_t row(int64_t b) const { return rows_B.const_data_ptr<int64_t>()[b]; }
  int64_t count(int64_t b) const {
    const int64_t count = counts_B.const_data_ptr<int64_t>()[b];
    REQUIRE_INDEX(count >= 0 && count <= tokens_BT.size(1), "draftsmith: a row has no ", count, " of ",
                  tokens_BT.size(1), " tokens");
    return count;
  }
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

  std::tuple<Tensor, Tensor, int64_t> draft(const Tensors& rows, const Tensors& counts, const Tensors& tokens,
                                            const Wish& wish, int64_t guesses, int64_t room) {
    const std::lock_guard<std::mutex> alone(busy_);
    REQUIRE(!rows.empty() && guesses > 0 && room > 0, "draftsmith: a draft is of somebody, and has guesses");
    take_in(rows, counts, tokens);
    const Tensor rows_B = rows.back().contiguous();
    const int64_t batch = rows_B.numel();
    std::vector<std::vector<int64_t>> trees(batch), above(batch);
    int64_t width = 0, depth = 0;
    for (int64_t b = 0; b < batch; ++b) {
      const int64_t number = rows_B.const_data_ptr<int64_t>()[b];
      if (number < 0) continue;
      Row& row = row_of(number);
      for (const int32_t place : row.places(wish, {})) {
        int64_t parent = kRoot;
        for (const int64_t token : row.copy(place, std::min(guesses, room - static_cast<int64_t>(trees[b].size())), {})) {
          above[b].push_back(parent), parent = trees[b].size(), trees[b].push_back(token);
        }
        depth = std::max(depth, std::min<int64_t>(guesses, trees[b].size()));
      }
      width = std::max<int64_t>(width, trees[b].size());
    }
    Tensor tokens_BN = full<int64_t>({batch, width}, 0), parents_BN = full({batch, width}, kUnused);
    for (int64_t b = 0; b < batch; ++b) {
      std::copy(trees[b].begin(), trees[b].end(), tokens_BN.mutable_data_ptr<int64_t>() + b * width);
      std::copy(above[b].begin(), above[b].end(), parents_BN.mutable_data_ptr<int64_t>() + b * width);
    }
    return {tokens_BN, parents_BN, depth};
  }

  std::vector<int64_t> go_on(int64_t number, const std::vector<int64_t>& ahead, bool frequent, int64_t count) {
    const std::lock_guard<std::mutex> alone(busy_);
    Row& row = row_of(number);
    const std::vector<int32_t> found = row.places({1, frequent, 0}, ahead);
    return found.empty() ? std::vector<int64_t>() : row.copy(found[0], count, ahead);
  }

  void leave(const std::vector<int64_t>& numbers) {
    const std::lock_guard<std::mutex> alone(busy_);
    for (const int64_t number : numbers) rows_.erase(number);
  }

 private:
  void take_in(const Tensors& rows, const Tensors& counts, const Tensors& tokens) {
    REQUIRE(rows.size() == counts.size() && rows.size() == tokens.size(), "draftsmith: these are no committed tokens");
    for (size_t i = 0; i < rows.size(); ++i) {
      const News news(rows[i], counts[i], tokens[i]);
      for (int64_t b = 0; b < news.batch(); ++b)
        if (news.row(b) >= 0) row_of(news.row(b)).extend(news.tokens(b), news.count(b));  // others are padding
    }
  }

  Row& row_of(int64_t number) { return rows_.try_emplace(number, shortest_, longest_).first->second; }

  const int64_t shortest_, longest_;
  std::mutex busy_;
  std::unordered_map<int64_t, Row> rows_;
};

int64_t make_ngrams(int64_t shortest, int64_t longest) { return keep(std::make_shared<Ngrams>(shortest, longest)); }

void read_ngrams(int64_t number, const Tensors& rows, const Tensors& counts, const Tensors& tokens) {
  kept<Ngrams>(number)->read(rows, counts, tokens);
}

std::tuple<Tensor, Tensor, int64_t> draft_ngrams(int64_t number, const Tensors& rows, const Tensors& counts,
                                                 const Tensors& tokens, int64_t places, bool frequent, int64_t shortest,
                                                 int64_t guesses, int64_t room) {
  return kept<Ngrams>(number)->draft(rows, counts, tokens, {places, frequent, shortest}, guesses, room);
}

std::vector<int64_t> continue_ngrams(int64_t number, int64_t row, const std::vector<int64_t>& ahead, bool frequent,
                                     int64_t count) {
  return kept<Ngrams>(number)->go_on(row, ahead, frequent, count);
}

void forget_ngrams(int64_t number, const std::vector<int64_t>& rows) { kept<Ngrams>(number)->leave(rows); }

}  // namespace

void define_ngrams(Library& library) {
  library.def_without_tensors<make_ngrams>("make_ngrams(int shortest, int longest) -> int");
  library.def<read_ngrams>("read_ngrams(int number, Tensor[] rows, Tensor[] counts, Tensor[] tokens) -> ()");
  library.def<draft_ngrams>(
      "draft_ngrams(int number, Tensor[] rows, Tensor[] counts, Tensor[] tokens, int places, bool frequent, "
      "int shortest, int guesses, int room) -> (Tensor, Tensor, int)");
  library.def_without_tensors<continue_ngrams>(
      "continue_ngrams(int number, int row, int[] ahead, bool frequent, int count) -> int[]");
  library.def_without_tensors<forget_ngrams>("forget_ngrams(int number, int[] rows) -> ()");
}

}  // namespace draftsmith
