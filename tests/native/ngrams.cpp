// Prompt lookup under sanitizers, against a search through the whole text: texts of few tokens, which repeat, grow by
// pieces and are looked up in between, with every kind of wish.
#include "ngrams.h"

#include <cstdio>
#include <cstdlib>
#include <map>

namespace {

using draftsmith::LookupRow;
using draftsmith::Wish;
using Text = std::vector<int64_t>;

// The places behind the newest tokens, longer matches first, each with another token there.
std::vector<int32_t> searched(const Text& text, const Text& ahead, int64_t shortest, int64_t longest, const Wish& wish) {
  const int64_t size = text.size();
  Text newest(text.end() - std::min(size, longest), text.end());
  newest.insert(newest.end(), ahead.begin(), ahead.end());
  std::vector<int32_t> found;
  for (int64_t n = longest; n >= shortest; --n) {
    if (n > static_cast<int64_t>(newest.size())) continue;
    std::vector<std::pair<int32_t, int64_t>> firsts;
    int64_t left = draftsmith::kMostPlaces;
    for (int64_t place = size - 1; place >= n && left > 0; --place) {
      if (!std::equal(newest.end() - n, newest.end(), text.begin() + place - n)) continue;
      if (!wish.frequent && static_cast<int64_t>(firsts.size()) >= wish.places) break;
      --left;
      bool known = false;
      for (auto& [first, times] : firsts)
        if (text[first] == text[place]) known = true, ++times;
      if (!known) firsts.push_back({static_cast<int32_t>(place), 1});
    }
    if (wish.frequent)
      std::stable_sort(firsts.begin(), firsts.end(), [](const auto& a, const auto& b) { return a.second > b.second; });
    for (const auto& [place, times] : firsts) {
      bool known = false;
      for (const int32_t other : found) known |= text[other] == text[place];
      if (!known) found.push_back(place);
    }
    if (static_cast<int64_t>(found.size()) >= wish.places) break;
  }
  if (static_cast<int64_t>(found.size()) > wish.places) found.resize(wish.places);
  return found;
}

}  // namespace

int main() {
  std::srand(1);
  int failures = 0, looked = 0;
  for (int64_t shortest = 1; shortest <= 3; ++shortest)
    for (int64_t longest = shortest; longest <= 6; longest += 2)
      for (const int64_t alphabet : {2, 5, 1 << 17}) {
        LookupRow row(shortest, longest);
        Text text;
        for (int step = 0; step < 200; ++step) {
          Text piece;
          for (int i = std::rand() % 4; i >= 0; --i) piece.push_back(std::rand() % alphabet);
          if (text.size() > 10 && std::rand() % 3 == 0) piece.assign(text.end() - 7, text.end() - 1);
          row.extend(piece.data(), piece.size());
          text.insert(text.end(), piece.begin(), piece.end());
          Text ahead;
          for (int i = std::rand() % 3; i > 0; --i) ahead.push_back(std::rand() % alphabet);
          const Wish wish{1 + std::rand() % 3, std::rand() % 2 == 0};
          const std::vector<int32_t> found = row.places(wish, ahead);
          failures += found != searched(text, ahead, shortest, longest, wish);
          for (const int32_t place : found) {
            Text behind = text;
            behind.insert(behind.end(), ahead.begin(), ahead.end());
            int64_t matched = 0;
            while (matched < place && text[place - 1 - matched] == behind[behind.size() - 1 - matched]) ++matched;
            for (const double factor : {0.3, 1.0, 2.5, 1e300}) {
              const double most = matched > 0 ? factor * static_cast<double>(matched) : 0;
              failures += row.worth(place, 8, factor, ahead) != (most < 8 ? static_cast<int64_t>(most) : 8);
            }
            failures += row.worth(place, 8, 0, ahead) != 8;
            const Text copied = row.copy(place, 9, ahead);
            Text grown = text;
            grown.insert(grown.end(), ahead.begin(), ahead.end());
            const size_t size = grown.size();
            for (size_t i = 0; i < 9; ++i) {
              grown.push_back(grown[place + i]);
              failures += copied[i] != grown[size + i];
            }
            ++looked;
          }
        }
      }
  std::printf("lookups: %d guesses, %d failures\n", looked, failures);
  return failures > 0 || looked < 1000;
}
