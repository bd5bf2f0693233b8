// A growing text, and where each of its n-grams was followed by what. drafters/lookup/ngram.py says what is computed.
#pragma once
#include <algorithm>
#include <cstdint>
#include <limits>
#include <random>
#include <stdexcept>
#include <vector>

namespace draftsmith {

constexpr int32_t kNowhere = -1;
constexpr int64_t kMostPlaces = 64;  // of an n-gram, the latest ones, are looked at

// No two processes have the same, so that nobody can write a text whose n-grams all meet in one place of a table.
inline uint64_t lookup_seed() {
  static const uint64_t seed = [] {
    std::random_device source;
    return static_cast<uint64_t>(source()) << 32 | source();
  }();
  return seed;
}

// Spreads every bit over all others (the finalizer of MurmurHash3, Appleby).
inline uint64_t mixed(uint64_t value) {
  value = (value ^ value >> 33) * 0xFF51AFD7ED558CCDu;
  value = (value ^ value >> 33) * 0xC4CEB9FE1A85EC53u;
  return value ^ value >> 33;
}

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
    uint64_t hash = lookup_seed();
    for (int64_t i = 0; i < n_; ++i) hash = mixed(hash ^ static_cast<uint64_t>(gram[i]));
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
  int64_t places;  // so many, each with another token there
  bool frequent;   // of equally long matches, not the latest but what followed most often
};

class LookupRow {
 public:
  LookupRow(int64_t shortest, int64_t longest) {
    for (int64_t n = shortest; n <= longest; ++n) grams_.emplace_back(n);
  }

  void extend(const int64_t* tokens, int64_t count) {
    if (text_.size() + count >= static_cast<size_t>(std::numeric_limits<int32_t>::max()))
      throw std::runtime_error("draftsmith: a text is too long to be looked up");
    text_.insert(text_.end(), tokens, tokens + count);
  }

  // Where to go on from behind the text and `ahead`, longer matches first.
  std::vector<int32_t> places(const Wish& wish, const std::vector<int64_t>& ahead) {
    const int64_t longest = grams_.back().length(), size = text_.size();
    std::vector<int64_t> newest(text_.end() - std::min(size, longest), text_.end());
    newest.insert(newest.end(), ahead.begin(), ahead.end());
    std::vector<int32_t> found;
    for (size_t i = grams_.size(); i-- > 0;) {
      Grams& grams = grams_[i];
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

  // How many of `count` guesses the match before a place is worth, at so many for each of its tokens; 0 sets no bound.
  int64_t worth(int32_t place, int64_t count, double factor, const std::vector<int64_t>& ahead) const {
    if (factor == 0) return count;
    const int64_t size = text_.size(), newest = ahead.size();
    const auto token = [&](int64_t back) {
      return back < newest ? ahead[newest - 1 - back] : text_[size + newest - 1 - back];
    };
    int64_t matched = 0;
    while (factor * matched < count && matched < place && text_[place - 1 - matched] == token(matched)) ++matched;
    return static_cast<int64_t>(std::min<double>(count, factor * matched));
  }

 private:
  std::vector<int64_t> text_;
  std::vector<Grams> grams_;
};

}  // namespace draftsmith
