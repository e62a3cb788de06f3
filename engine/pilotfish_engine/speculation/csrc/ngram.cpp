// Drafts by matching: what followed the last tokens when they occurred before (prompt lookup, Saxena 2023).
//
// For each request the known tokens are searched backwards for the longest earlier occurrence of their own suffix. The
// continuations of up to `topk` matches, longest first and the most recent among equals, are merged into a trie; a chain is
// the case topk = 1. A continuation that reaches the end of the known tokens goes on through itself, so that a loop of any
// period is drafted to full depth. Plain C interface, no allocation, no state.
#include <cmath>
#include <cstdint>

namespace {

struct Match {
  int64_t length;  // of the common suffix
  int64_t next;    // index of the first token after the earlier occurrence
};

bool better(const Match& a, const Match& b) { return a.length != b.length ? a.length > b.length : a.next > b.next; }

constexpr int kMaxMatches = 8;

// Best `wanted` matches in order. Different occurrences may continue alike; the trie merges them.
int find_matches(const int64_t* tokens, int64_t known, int64_t min_ngram, int64_t max_ngram, int wanted, Match* best) {
  int found = 0;
  const int64_t last = tokens[known - 1];
  for (int64_t end = known - 2; end >= min_ngram - 1; --end) {
    if (tokens[end] != last) continue;
    int64_t length = 1;
    while (length < max_ngram && length <= end && tokens[end - length] == tokens[known - 1 - length]) ++length;
    if (length < min_ngram) continue;
    const Match match{length, end + 1};
    if (found == wanted && !better(match, best[found - 1])) continue;
    int at = found < wanted ? found++ : found - 1;
    while (at > 0 && better(match, best[at - 1])) {
      best[at] = best[at - 1];
      --at;
    }
    best[at] = match;
    if (wanted == 1 && length == max_ngram) break;  // nothing later in the scan is longer or more recent
  }
  return found;
}

}  // namespace

extern "C" {

// tokens: [*, stride]; request b is row rows[b], of which seq_lens[rows[b]] + 1 tokens are known. Outputs [batch, width] with
// width = topk * num_steps: token_ids, parents (−1: root), scores (−inf: absent); parents come before children.
__attribute__((visibility("default"))) void ngram_propose(const int64_t* tokens, int64_t stride, const int64_t* seq_lens, const int64_t* rows, int64_t batch,
                   int64_t min_ngram, int64_t max_ngram, int64_t topk, int64_t num_steps, int64_t* token_ids,
                   int64_t* parents, float* scores) {
  const int64_t width = topk * num_steps;
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t* known = tokens + rows[b] * stride;
    const int64_t count = seq_lens[rows[b]] + 1;
    int64_t* ids = token_ids + b * width;
    int64_t* up = parents + b * width;
    float* score = scores + b * width;
    for (int64_t i = 0; i < width; ++i) {
      ids[i] = 0;
      up[i] = -1;
      score[i] = -INFINITY;
    }
    Match best[kMaxMatches];
    const int wanted = topk < kMaxMatches ? static_cast<int>(topk) : kMaxMatches;
    const int found = find_matches(known, count, min_ngram, max_ngram, wanted, best);
    int64_t used = 0;
    for (int m = 0; m < found; ++m) {
      // Longer contexts are surer, later branches less so. Only the order matters: the yield is learnt by measurement.
      const float step = -1.0f / static_cast<float>(1 + best[m].length) - 0.5f * static_cast<float>(m);
      int64_t parent = -1;
      float path = 0.0f;
      for (int64_t d = 0; d < num_steps; ++d) {
        int64_t at = best[m].next + d;
        const int64_t period = count - best[m].next;
        if (at >= count) at = best[m].next + d % period;
        const int64_t token = known[at];
        int64_t node = 0;
        while (node < used && !(up[node] == parent && ids[node] == token)) ++node;
        path += step;
        if (node == used) {
          ids[used] = token;
          up[used] = parent;
          score[used] = path;
          ++used;
        } else {
          path = score[node];
        }
        parent = node;
      }
    }
  }
}

}  // extern "C"
