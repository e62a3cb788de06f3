// Drafts by matching: what followed the last tokens when they occurred before (prompt lookup, Saxena 2023).
//
// A request's known tokens are scanned backwards for the occurrences of their own suffix: the `wanted` best, longest
// first and the most recent among equals. Their continuations are merged into a trie in which each counts by its
// weight, so that what followed more often branches first; a chain is the case of one match. A corpus, when there is
// one, is asked too, and is followed where it knows a longer context than the request's own text does.
//
// Plain C interface. Nothing is kept between calls: no index of a request has to be updated, retracted or bounded.
// ngram_tensors.py is the same in tensor code; both give the same candidates, number for number.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace {

constexpr int kMaxMatches = 16;
constexpr int kMaxContext = 8;
constexpr int kMaxSteps = 8;
constexpr int kWindow = 16;        // corpus entries looked at around a context's place
constexpr int64_t kUnit = 720720;  // 1 … 16 divide it: weights are whole numbers, and their sums exact
constexpr int64_t kNone = -1;      // no token: between documents, and behind the last one

struct Match {
  int64_t length = 0;  // of the common context
  int64_t at = 0;      // index of the first token after it
  int64_t weight = 0;
  int64_t next[kMaxSteps];  // the tokens from `at` on; kNone from where nothing follows
};

struct Options {
  int64_t min_ngram, max_ngram, topk, num_steps;
  int wanted;
};

struct Corpus {
  const int32_t* tokens;  // documents with kNone between them, kMaxContext times in front and kMaxSteps times behind
  const int32_t* order;   // indices into `tokens`, sorted by the tokens before them, the nearest first
  int64_t entries;
};

bool better(const Match& a, const Match& b) { return a.length != b.length ? a.length > b.length : a.at > b.at; }

// The best matches in the request's own tokens. A continuation that reaches their end goes on through itself, so that a
// loop of any period is drafted to full depth.
int own_matches(const int64_t* tokens, int64_t known, const Options& options, Match* best) {
  int found = 0;
  const int64_t last = tokens[known - 1];
  for (int64_t end = known - 2; end >= options.min_ngram - 1; --end) {
    if (tokens[end] != last) continue;
    Match match;
    match.length = 1;
    while (match.length < options.max_ngram && match.length <= end &&
           tokens[end - match.length] == tokens[known - 1 - match.length])
      ++match.length;
    if (match.length < options.min_ngram) continue;
    match.at = end + 1;
    if (found == options.wanted && !better(match, best[found - 1])) continue;
    int place = found < options.wanted ? found++ : found - 1;
    for (; place > 0 && better(match, best[place - 1]); --place) best[place] = best[place - 1];
    best[place] = match;
    // nothing farther back is better than `wanted` matches of full length
    if (found == options.wanted && best[found - 1].length == options.max_ngram) break;
  }
  for (int m = 0; m < found; ++m) {
    const int64_t period = known - best[m].at;
    for (int64_t d = 0; d < options.num_steps; ++d) best[m].next[d] = tokens[best[m].at + d % period];
    best[m].weight = (kUnit << best[m].length) / (m + 1);
  }
  return found;
}

// Where the context before tokens[at] stands to `suffix`, both nearest token first: below 0, 0 or above 0. The suffix
// has no kNone in it, so nothing before a document's start is read.
int compare(const int32_t* tokens, int64_t at, const int64_t* suffix, int64_t max_ngram) {
  for (int64_t j = 0; j < max_ngram; ++j) {
    const int64_t token = tokens[at - 1 - j];
    if (token != suffix[j]) return token < suffix[j] ? -1 : 1;
  }
  return 0;
}

// The best matches in the corpus, among the entries around the place of the request's context in the order: none of the
// others shares more of it.
int corpus_matches(const Corpus& corpus, const int64_t* tokens, int64_t known, const Options& options, Match* best) {
  int64_t suffix[kMaxContext];
  for (int64_t j = 0; j < options.max_ngram; ++j) suffix[j] = j < known ? tokens[known - 1 - j] : kNone - 1;
  int64_t low = 0, high = corpus.entries;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (compare(corpus.tokens, corpus.order[middle], suffix, options.max_ngram) < 0)
      low = middle + 1;
    else
      high = middle;
  }
  int found = 0;
  const int64_t end = std::min(corpus.entries, low + kWindow / 2);
  for (int64_t entry = std::max<int64_t>(0, low - kWindow / 2); entry < end; ++entry) {
    Match match;
    match.at = corpus.order[entry];
    while (match.length < options.max_ngram && corpus.tokens[match.at - 1 - match.length] == suffix[match.length])
      ++match.length;
    if (match.length < options.min_ngram) continue;
    if (found == options.wanted && match.length <= best[found - 1].length) continue;
    int place = found < options.wanted ? found++ : found - 1;
    for (; place > 0 && match.length > best[place - 1].length; --place) best[place] = best[place - 1];
    best[place] = match;
  }
  for (int m = 0; m < found; ++m) {
    bool goes_on = true;
    for (int64_t d = 0; d < options.num_steps; ++d) {
      goes_on = goes_on && corpus.tokens[best[m].at + d] != kNone;
      best[m].next[d] = goes_on ? corpus.tokens[best[m].at + d] : kNone;
    }
    best[m].weight = kUnit << best[m].length;
  }
  return found;
}

struct Output {
  int64_t* token_ids;
  int64_t* parents;
  float* scores;
};

// Merges the continuations. A node is named by the first match that reaches it: column 0 … topk − 1 for the first
// tokens, best first, then `wanted` columns a depth, that of match m being m.
void merge(const Match* matches, int found, const Options& options, const Output& out) {
  int64_t total = 0;
  for (int m = 0; m < found; ++m) total += matches[m].weight;
  int node[kMaxMatches];        // of each match at the last depth; −1: cut off or at its end
  int64_t column[kMaxMatches];  // of each node at the last depth
  std::fill(node, node + found, 0);
  column[0] = -1;  // all begin at the root
  for (int64_t d = 0; d < options.num_steps; ++d) {
    int first[kMaxMatches];
    int64_t votes[kMaxMatches] = {};
    for (int m = 0; m < found; ++m) {
      first[m] = -1;
      if (node[m] < 0 || matches[m].next[d] == kNone) continue;
      first[m] = m;
      for (int i = m - 1; i >= 0; --i)
        if (first[i] == i && node[i] == node[m] && matches[i].next[d] == matches[m].next[d]) first[m] = i;
      votes[first[m]] += matches[m].weight;
    }
    int64_t columns[kMaxMatches];
    bool kept[kMaxMatches] = {};
    for (int m = 0; m < found; ++m) {
      if (first[m] != m) continue;
      int64_t rank = 0;  // among its siblings
      for (int i = 0; i < found; ++i)
        if (first[i] == i && node[i] == node[m]) rank += votes[i] > votes[m] || (votes[i] == votes[m] && i < m);
      if (rank >= options.topk) continue;
      kept[m] = true;
      columns[m] = d == 0 ? rank : options.topk + (d - 1) * options.wanted + m;
      out.token_ids[columns[m]] = matches[m].next[d];
      out.parents[columns[m]] = column[node[m]];
      // the share of the votes, and at each step the risk that the context misleads: longer ones are surer
      const double risk = 2.0 * static_cast<double>(d + 1) / static_cast<double>(1 + matches[m].length);
      const double share = static_cast<double>(votes[m]) / static_cast<double>(total);
      out.scores[columns[m]] = static_cast<float>(std::log(share) - risk);
    }
    for (int m = 0; m < found; ++m) {
      node[m] = first[m] >= 0 && kept[first[m]] ? first[m] : -1;
      if (kept[m]) column[m] = columns[m];
    }
  }
}

}  // namespace

extern "C" {

// tokens: [*, stride]; request b is row rows[b], of which seq_lens[rows[b]] + 1 tokens are known. Outputs [batch, width]
// with width = topk + (num_steps − 1) * wanted: token_ids, parents (−1: root), scores (−inf: absent); parents come
// before children. max_ngram, topk and num_steps are 8 at most, wanted 16. corpus_entries 0: no corpus.
__attribute__((visibility("default"))) void ngram_drafts(
    const int64_t* tokens, int64_t stride, const int64_t* seq_lens, const int64_t* rows, int64_t batch,
    int64_t min_ngram, int64_t max_ngram, int64_t wanted, int64_t topk, int64_t num_steps,
    const int32_t* corpus_tokens, const int32_t* corpus_order, int64_t corpus_entries, int64_t* token_ids,
    int64_t* parents, float* scores) {
  const Options options{min_ngram, max_ngram, topk, num_steps, static_cast<int>(wanted)};
  const Corpus corpus{corpus_tokens, corpus_order, corpus_entries};
  const int64_t width = topk + (num_steps - 1) * wanted;
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t* own = tokens + rows[b] * stride;
    const int64_t known = seq_lens[rows[b]] + 1;
    const Output out{token_ids + b * width, parents + b * width, scores + b * width};
    std::fill(out.token_ids, out.token_ids + width, 0);
    std::fill(out.parents, out.parents + width, -1);
    std::fill(out.scores, out.scores + width, -INFINITY);
    Match in_own[kMaxMatches], in_corpus[kMaxMatches];
    const int found = own_matches(own, known, options, in_own);
    const int farther = corpus.entries > 0 ? corpus_matches(corpus, own, known, options, in_corpus) : 0;
    if (farther > 0 && (found == 0 || in_corpus[0].length > in_own[0].length))
      merge(in_corpus, farther, options, out);
    else
      merge(in_own, found, options, out);
  }
}

// Writes to `order` the indices of all tokens that have one before them in their document, sorted by the `max_ngram`
// tokens before them, the nearest first, and by index among equals. tokens: as in a corpus above. Returns how many.
__attribute__((visibility("default"))) int64_t ngram_order(const int32_t* tokens, int64_t count, int64_t max_ngram,
                                                           int32_t* order) {
  struct Entry {
    uint64_t nearest;  // the two nearest tokens: most comparisons end here, without a look into the text
    int32_t at;
  };
  std::vector<Entry> entries;
  entries.reserve(static_cast<size_t>(count));
  for (int64_t at = max_ngram; at < count; ++at) {
    if (tokens[at] == kNone || tokens[at - 1] == kNone) continue;
    const auto nearest = static_cast<uint64_t>(tokens[at - 1] + 1) << 32 | static_cast<uint64_t>(tokens[at - 2] + 1);
    entries.push_back({nearest, static_cast<int32_t>(at)});
  }
  std::sort(entries.begin(), entries.end(), [&](const Entry& a, const Entry& b) {
    if (a.nearest != b.nearest) return a.nearest < b.nearest;
    for (int64_t j = 0; j < max_ngram; ++j) {
      const int32_t of_a = tokens[a.at - 1 - j], of_b = tokens[b.at - 1 - j];
      if (of_a != of_b) return of_a < of_b;
      if (of_a == kNone) break;  // what stands before a document is no part of its order
    }
    return a.at < b.at;
  });
  for (size_t i = 0; i < entries.size(); ++i) order[i] = entries[i].at;
  return static_cast<int64_t>(entries.size());
}

}  // extern "C"
